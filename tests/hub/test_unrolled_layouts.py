"""EAGLE-3's and SpecBlock's released layouts, read and drafted with as the oracles, written from the papers, draft."""

import json
from itertools import pairwise

import pytest
import torch
from safetensors.torch import save_file
from transformers import LogitsProcessorList
from typer.testing import CliRunner

from hf_hyperdflash import Eagle3Drafter, SpecBlockDrafter, load_drafter
from hf_hyperdflash.cli.app import app
from hf_hyperdflash.decoding.bind import capture_residual
from hf_hyperdflash.drafters.sampling import DraftSampler
from hf_hyperdflash.drafters.unrolled.drafter import UnrolledDrafter
from hf_hyperdflash.hub.loading import load_target
from hf_hyperdflash.hub.publish import planned_push
from hf_hyperdflash.targets.registry import target_of
from hf_hyperdflash.trees.growth import DraftStep
from hf_hyperdflash.trees.tree import DraftTree

from ..conftest import prompt, tiny_target
from ..helpers import oracle_eagle3, oracle_specblock
from ..helpers.families import llama, qwen3
from ..helpers.training import trainer_for

LAYERS, WIDTH, VOCABULARY, DRAFTED = [1, 3, 4], 64, 64, 40
LAYER = {
    "vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 48, "hidden_act": "silu", "rms_norm_eps": 1e-6,
    "max_position_embeddings": 512, "rope_theta": 5000.0, "model_type": "llama", "tie_word_embeddings": False,
}  # fmt: skip


@pytest.fixture(scope="module")
def target():
    torch.manual_seed(0)
    return qwen3(layers=8).eval()


def attention(prefix: str, reads: int) -> dict[str, torch.Tensor]:
    shapes = {"q": (64, reads), "k": (32, reads), "v": (32, reads), "o": (WIDTH, 64)}
    return {f"{prefix}.self_attn.{part}_proj.weight": torch.randn(*shape) / 8 for part, shape in shapes.items()}


def mlp(prefix: str) -> dict[str, torch.Tensor]:
    shapes = {"gate": (48, WIDTH), "up": (48, WIDTH), "down": (WIDTH, 48)}
    return {f"{prefix}.mlp.{part}_proj.weight": torch.randn(*shape) / 6 for part, shape in shapes.items()}


def norm(width: int = WIDTH) -> torch.Tensor:
    return 1 + torch.randn(width) / 10


def truncated() -> dict[str, torch.Tensor]:
    ids = torch.randperm(VOCABULARY)[:DRAFTED].sort().values
    kept = torch.zeros(VOCABULARY, dtype=torch.bool).index_fill_(0, ids, True)
    return {"d2t": ids - torch.arange(DRAFTED), "t2d": kept, "lm_head.weight": torch.randn(DRAFTED, WIDTH) / 4}


def eagle3_tensors(qk_norm=False, norm_before_fc=False, fc_norm=False) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    parts = ("hidden_norm", "input_layernorm", "post_attention_layernorm")
    tensors = {f"midlayer.{part}.weight": norm() for part in parts}
    tensors |= {**attention("midlayer", 2 * WIDTH), **mlp("midlayer"), **truncated(), "norm.weight": norm()}
    tensors["fc.weight"] = torch.randn(WIDTH, 3 * WIDTH) / 8
    if qk_norm:
        tensors |= {f"midlayer.self_attn.{part}_norm.weight": norm(16) for part in "qk"}
    if norm_before_fc:
        tensors["input_norm.weight"] = norm(3 * WIDTH)
    if fc_norm:
        tensors |= {f"fc_norm.{i}.weight": norm() for i in range(3)}
    return tensors


def specblock_tensors(layers=2, slots=3) -> dict[str, torch.Tensor]:
    torch.manual_seed(2)
    names = ("condition_norm", "token_norm", "query_norm")
    tensors = {f"input_layer.{name}.weight": norm() for name in names}
    tensors |= {
        "input_layer.condition_proj.weight": torch.randn(WIDTH, 3 * WIDTH) / 8,
        "input_layer.position_queries.weight": torch.randn(slots, WIDTH),
        "input_layer.fuse.weight": torch.randn(WIDTH, 3 * WIDTH) / 8,
        "rank_head.0.weight": torch.randn(256, WIDTH + 15) / 8, "rank_head.2.weight": torch.randn(4, 256) / 8,
        "norm.weight": norm(),
    }  # fmt: skip
    for i in range(layers):
        tensors |= {**attention(f"layers.{i}", WIDTH), **mlp(f"layers.{i}")}
        tensors |= {f"layers.{i}.{name}.weight": norm() for name in ("input_layernorm", "post_attention_layernorm")}
        if i:
            tensors[f"shift_proj.{i - 1}.weight"] = torch.randn(WIDTH, 2 * WIDTH) / 8
    return tensors | truncated()


def saved(folder, fields: dict, tensors: dict[str, torch.Tensor]):
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


def safeailab(folder, tensors, **more):
    fields = {**LAYER, "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": DRAFTED}
    eagle = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": LAYERS}}
    return saved(folder, {**fields, **eagle, **more}, tensors)


def speculators(folder, tensors, kind="llama", **more):
    named = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
    fields = {
        "speculators_model_type": "eagle3", "architectures": ["Eagle3Speculator"], "draft_vocab_size": DRAFTED,
        "transformer_layer_config": {**LAYER, "model_type": kind},
        "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "some/qwen3"}},
        "eagle_aux_hidden_state_layer_ids": [layer + 1 for layer in LAYERS], **more,
    }  # fmt: skip
    return saved(folder, fields, named)


@torch.no_grad()
def read(target, ids: torch.Tensor, layers=LAYERS) -> tuple[torch.Tensor, torch.Tensor]:
    """Features of every token, `[seq, layers * width]`, the mean over the streams of each layer, and embeddings of the
    tokens after."""
    with capture_residual(target, layers) as captured:
        target(ids)
    return captured[0][0].unflatten(1, (len(layers), -1)).mean(2).flatten(1), target.get_input_embeddings()(ids[0, 1:])


class Followed(DraftSampler):
    """Takes given tokens for drafts, and keeps what it is told."""

    def __init__(self, tokens: list[int]) -> None:
        super().__init__(LogitsProcessorList(), False)
        self.tokens, self.seen = tokens, []

    def grow(self, ids, count, steps, width=None):
        for k in range(count):
            last = torch.tensor([self.tokens[k - 1] if k else int(ids[0, -1])])
            step: DraftStep = steps(k, last, torch.zeros(1, dtype=torch.long))
            self.seen.append(step.whole().logits[0])
        return super()._path(ids, 0, steps)

    def blind(self, ids, logits):
        first = len(self.seen)
        self.seen += logits[0]
        taken = [*self.tokens, self.tokens[-1]][first : len(self.seen)]  # nothing follows the last
        return DraftTree.chain(torch.tensor(taken))


@torch.no_grad()
def drafted(drafter, target, ids: torch.Tensor, tokens: list[int], parts=(1,)) -> torch.Tensor:
    """Logits `[drafts, vocabulary]` along a path of given tokens, the text taken in in several parts."""
    with capture_residual(target, drafter.layers_read(target_of(target))) as captured:
        target(ids[:, :-1])
    context, positions = drafter.new_context(), torch.arange(ids.shape[1])[None]
    starts = [0, *parts, ids.shape[1] - 1]
    for start, stop in pairwise(starts):
        part = slice(start, stop)
        drafter.extend(
            target_of(target), context, captured[0][:, part], positions[:, part], ids[:, start + 1 : stop + 1]
        )
    if isinstance(drafter, UnrolledDrafter):  # whose next round would take in what is pending
        drafter.flush_pending(target_of(target), [context])
    held = len(context)
    sampler = Followed(tokens)
    drafter.propose(target_of(target), context, ids, positions, len(tokens) + 1, sampler)
    assert len(context) == held  # as it was
    return torch.stack(sampler.seen)


WRITTEN = {"safeailab": safeailab, "speculators": speculators}
EAGLE3 = [
    ("safeailab", {}, {}),
    ("safeailab", {"fc_norm": True}, {"fc_norm": True, "norm_output": True}),
    ("speculators", {}, {}),
    ("speculators", {"qk_norm": True}, {"kind": "qwen3", "norm_before_residual": True}),
    ("speculators", {"norm_before_fc": True}, {"norm_before_fc": True, "norm_output": True}),
]
FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


@pytest.mark.parametrize(("layout", "parts", "fields"), EAGLE3, ids=str)
def test_eagle3(tmp_path, target, layout, parts, fields):
    tensors = eagle3_tensors(**parts)
    drafter = load_drafter(WRITTEN[layout](tmp_path, tensors, **fields), dtype=torch.float32)
    assert isinstance(drafter, Eagle3Drafter) and drafter.layers_read(target_of(target)) == LAYERS
    flags = {name: fields.get(name, False) for name in FLAGS}
    if layout == "safeailab":  # where it says that the LM head reads normed states
        flags["norm_output"] = False
    check_eagle3(drafter, target, tensors, **flags)


@torch.no_grad()
def check_eagle3(drafter, target, tensors, layers=LAYERS, **flags):
    """Logits along a path, against loops over the tensors as their publisher names them."""
    tensors = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in tensors.items()}
    ids, tokens = prompt(12), [7, 9, 9, 30]
    shape = oracle_eagle3.Shape(4, 2, 16, 1e-6, 5000.0, **flags)
    features, _ = read(target, ids, layers)
    embed = oracle_embedding(target, tensors)
    embeds = torch.stack([embed(token) for token in ids[0, 1:].tolist()])
    known, path = oracle_eagle3.entries(tensors, shape, features[:-1], embeds), []
    expected = [oracle_eagle3.target_logits(tensors, shape, known[-1].out, VOCABULARY)]
    for token in tokens:
        path.append(oracle_eagle3.further(tensors, shape, known, path, embed(token)))
        expected.append(oracle_eagle3.target_logits(tensors, shape, path[-1].out, VOCABULARY))
    drafter.check_target(target_of(target))
    assert drafter.layers_read(target_of(target)) == layers
    for cuts in ((1,), (3, 8)):
        found = drafted(drafter, target, ids, tokens, cuts)
        torch.testing.assert_close(found, torch.stack(expected), atol=2e-4, rtol=1e-3)


def oracle_embedding(target, tensors):
    table = tensors.get("embed_tokens.weight", target.get_input_embeddings().weight).detach()
    return lambda token: table[token]


def whole() -> dict[str, torch.Tensor]:
    """A head for every token, and no list of them."""
    return {"lm_head.weight": torch.randn(VOCABULARY, WIDTH) / 4}


def listed(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {"d2t": torch.zeros(VOCABULARY, dtype=torch.long), **tensors}


FLAT = {**LAYER, "draft_vocab_size": DRAFTED}
HUNYUAN = {
    "attention_head_dim": 128, "cla_share_factor": 2, "class_num": 0, "dense_list": [64, 0], "eod_token_id": 3,
    "mask_init_id": 12, "norm_type": "rms", "org_vocab_size": 64, "pool_type": "last", "use_cla": False,
    "use_qk_norm": True, "use_rotary_pos_emb": True, "im_end_id": 5, "tie_word_embeddings": True,
}  # fmt: skip
NVIDIA = {
    "use_aux_hidden_state": True, "use_input_layernorm_in_first_layer": True, "use_last_layernorm": True,
    "use_mtp_layernorm": False, "next_layer_regular": True, "parallel_draft_step": 1,
    "parallel_draft_heads_num_layers": 1,
}  # fmt: skip
IDS = "eagle_aux_hidden_state_layer_ids"
PUBLISHED = {
    "SafeAILab, Vicuna": {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 40, "bos_token_id": 1},
    "SafeAILab, without key heads": {"architectures": ["LlamaForCausalLM"], "torch_dtype": "float16"},
    "AngelSlim": {"architectures": ["Eagle3LlamaForCausalLM"], "num_hidden_layers": 24, "target_model_type": "qwen3"},
    "AngelSlim, Hunyuan": {"architectures": ["Eagle3LlamaForCausalLM"], **HUNYUAN},
    "AngelSlim, CosyVoice": {"architectures": ["CosyVoice3Eagle3LlamaForCausalLM"], "sliding_window": 32768},
    "no architecture": {"max_window_layers": 36, "use_sliding_window": False, "sliding_window": None},
    "vLLM's ids": {"architectures": ["LlamaForCausalLMEagle3"], IDS: [1, 3, 6]},
    "NVIDIA": {"architectures": ["LlamaForCausalLMEagle3"], "eagle_config": {**NVIDIA, IDS: [0, 2, 5]}},
    "both": {IDS: [1, 3, 6], "eagle_config": {IDS: [0, 2, 5]}, "num_aux_hidden_states": 3},
    "all layers full": {"layer_types": ["full_attention"], "sliding_window": 8, "use_sliding_window": True},
}


@pytest.mark.parametrize("publisher", PUBLISHED)
def test_eagle3_as_it_is_published(tmp_path, target, publisher):
    """Known by its fields, whatever it calls itself; one layer, whatever it says of layers."""
    tensors = eagle3_tensors()
    drafter = load_drafter(saved(tmp_path, {**FLAT, **PUBLISHED[publisher]}, tensors), dtype=torch.float32)
    assert isinstance(drafter, Eagle3Drafter) and drafter.config.num_hidden_layers == 1
    check_eagle3(drafter, target, tensors, [0, 2, 5] if IDS in str(PUBLISHED[publisher]) else LAYERS)


def test_key_heads_are_llamas_where_nothing_is_said(tmp_path):
    tensors = eagle3_tensors()
    for part in "kv":
        tensors[f"midlayer.self_attn.{part}_proj.weight"] = torch.randn(64, 2 * WIDTH)
    fields = {name: value for name, value in FLAT.items() if name != "num_key_value_heads"}
    assert load_drafter(saved(tmp_path, fields, tensors)).config.num_key_value_heads == 4


def test_eagle3_of_several_layers(tmp_path, target):
    """NVIDIA's may have them; the tensors count, whatever is said of a target's layers."""
    tensors = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in eagle3_tensors().items()}
    for i in (1, 2):
        tensors |= {**attention(f"layers.{i}", WIDTH), **mlp(f"layers.{i}")}
        tensors |= {f"layers.{i}.{part}.weight": norm() for part in ("input_layernorm", "post_attention_layernorm")}
    fields = {**FLAT, **PUBLISHED["NVIDIA"], "num_hidden_layers": 94}
    drafter = load_drafter(saved(tmp_path, fields, tensors), dtype=torch.float32)
    assert drafter.config.num_hidden_layers == 3
    check_eagle3(drafter, target, tensors, [0, 2, 5])


def deepspec(folder, **more):
    """Its layers are Qwen3's, it drafts every token and has copies of the target's embedding and head."""
    tensors = eagle3_tensors(qk_norm=True)
    tensors = {name: tensor for name, tensor in tensors.items() if name not in ("d2t", "t2d")} | whole()
    tensors["fc.weight"] = torch.randn(WIDTH, 5 * WIDTH) / 8
    tensors["embed_tokens.weight"] = torch.randn(VOCABULARY, WIDTH)
    tensors = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
    fields = {
        **LAYER, "architectures": ["Qwen3Eagle3Model"], "model_type": "qwen3", "target_layer_ids": [0, 1, 3, 5, 6],
        "ttt_length": 7, "step_loss_decay": 0.8, "draft_num_hidden_layers": 1, "num_target_layers": 8,
        "layer_types": ["full_attention"], "target_model_name_or_path": "Qwen/Qwen3-4B", "use_sliding_window": False,
    }  # fmt: skip
    return saved(folder, {**fields, **more}, tensors), tensors


def test_eagle3_of_deepspec(tmp_path, target):
    folder, tensors = deepspec(tmp_path)
    drafter = load_drafter(folder, dtype=torch.float32)
    assert drafter.config.qk_norm and drafter.config.target_name_or_path == "Qwen/Qwen3-4B"
    check_eagle3(drafter, target, listed(tensors), [0, 1, 3, 5, 6])


def test_copies_of_the_targets_are_shared(tmp_path, target):
    """Its embedding and head of the whole vocabulary, which DeepSpec's files hold."""
    _, tensors = deepspec(tmp_path)
    copies = {
        "embed_tokens.weight": target.get_input_embeddings().weight.detach().clone(),
        "lm_head.weight": target.get_output_embeddings().weight.detach().clone(),
    }
    tensors |= copies
    saved(tmp_path, json.loads((tmp_path / "config.json").read_text()), tensors)
    drafter = load_drafter(tmp_path, target=target, dtype=torch.float32)
    assert not drafter.config.own_embedding and not drafter.config.draft_vocab_size
    check_eagle3(drafter, target, listed(tensors), [0, 1, 3, 5, 6])


@pytest.mark.parametrize("size", [None, VOCABULARY])
@pytest.mark.parametrize("written", [safeailab, speculators])
def test_a_whole_vocabulary_without_a_head_is_drafted_with_the_targets(tmp_path, target, written, size):
    tensors = {name: tensor for name, tensor in eagle3_tensors().items() if name not in ("d2t", "t2d")}
    del tensors["lm_head.weight"]
    drafter = load_drafter(written(tmp_path, tensors, draft_vocab_size=size), dtype=torch.float32)
    head = {"lm_head.weight": target.get_output_embeddings().weight.detach()}
    check_eagle3(drafter, target, listed(tensors | head))


def test_a_tied_head_is_its_own_embedding(tmp_path, target):
    tensors = eagle3_tensors() | {"embed_tokens.weight": torch.randn(VOCABULARY, WIDTH)}
    tensors = {name: tensor for name, tensor in tensors.items() if name not in ("d2t", "t2d", "lm_head.weight")}
    fields = {"draft_vocab_size": None, "tie_word_embeddings": True}
    drafter = load_drafter(safeailab(tmp_path, tensors, **fields), dtype=torch.float32)
    check_eagle3(drafter, target, listed({**tensors, "lm_head.weight": tensors["embed_tokens.weight"]}))


def test_empty_lists_of_a_whole_vocabulary(tmp_path, target):
    """SafeAILab's buffers, which are zeros where it drafts every token."""
    tensors = eagle3_tensors() | whole() | {"t2d": torch.zeros(VOCABULARY, dtype=torch.bool)}
    tensors["d2t"] = torch.zeros(VOCABULARY, dtype=torch.long)
    drafter = load_drafter(safeailab(tmp_path, tensors, draft_vocab_size=VOCABULARY), dtype=torch.float32)
    check_eagle3(drafter, target, tensors)


@torch.no_grad()
def test_eagle3s_dynamic_tree(tmp_path, target):
    """At SHARPENED = 1 ours is theirs: the sharpening changes which nodes are held to be the best."""
    tensors = eagle3_tensors()
    drafter = load_drafter(safeailab(tmp_path, tensors), dtype=torch.float32)
    drafter.config.tree_width, ids = 3, prompt(12)
    shape = oracle_eagle3.Shape(4, 2, 16, 1e-6, 5000.0)
    features, embeds = read(target, ids)
    known = oracle_eagle3.entries(tensors, shape, features[:-1], embeds)
    table = target.get_input_embeddings()
    with capture_residual(target, LAYERS) as captured:
        target(ids[:, :-1])
    context, positions = drafter.new_context(), torch.arange(ids.shape[1])[None]
    drafter.extend(target_of(target), context, captured[0], positions[:, :-1], ids[:, 1:])
    for budget in (4, 14, 21):
        expected = oracle_eagle3.dynamic_tree(
            tensors, shape, known, lambda token: table(torch.tensor(token)), VOCABULARY, 3, 3, budget
        )
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("hf_hyperdflash.trees.growth.SHARPENED", 1.0)
            sampler = DraftSampler(LogitsProcessorList(), False, budget)
            tree = drafter.propose(target_of(target), context, ids, positions, 3, sampler)
        found = {tuple(tree.tokens[tree.path(node)].tolist()) for node in range(len(tree))}
        assert found == expected, budget


@pytest.mark.parametrize("ablation", [(), ("shift",), ("broadcast",), ("shift", "broadcast")], ids=str)
@torch.no_grad()
def test_specblock(tmp_path, target, ablation):
    """Blocks that go on from blocks that go on from blocks, along a path, against loops."""
    tensors, slots = specblock_tensors(), 3
    fields = {**LAYER, "num_hidden_layers": 2, "diffspec_draft_token_num": slots, "draft_vocab_size": DRAFTED}
    fields |= {"architectures": ["LlamaForCausalLMSpecBlock"], "rank_classes": 4}
    drafter = load_drafter(saved(tmp_path, fields, tensors), dtype=torch.float32)
    assert isinstance(drafter, SpecBlockDrafter) and drafter.config.usual_layers
    drafter.check_target(target_of(target))
    assert drafter.layers_read(target_of(target)) == [1, 3, 4]
    drafter.config.shift, drafter.config.broadcast = "shift" not in ablation, "broadcast" not in ablation
    ids, tokens = prompt(12), [7, 9, 9, 30, 2, 11, 5]
    shape, table = oracle_specblock.Shape(4, 2, 16, 2, slots, 1e-6, 5000.0), target.get_input_embeddings()
    features, embeds = read(target, ids)
    off = frozenset(ablation)
    known = oracle_specblock.blocks(tensors, shape, features[:-1], embeds, off)
    last, path, expected = known[-1], [], []
    kept = tensors["t2d"].nonzero().flatten()
    for k in range(len(tokens) + 1):
        if k and k % slots == 0:
            path.append((last, slots - 1))
            embed = table(torch.tensor(tokens[k - 1]))
            last = oracle_specblock.later_block(tensors, shape, known, len(known) - 1, path, embed, off)
        logits = oracle_specblock.logits(tensors, shape, last.hidden[k % slots])
        expected.append(torch.full((VOCABULARY,), -torch.inf).index_copy(0, kept, logits))
    for cuts in ((1,), (3, 8)):
        found = drafted(drafter, target, ids, tokens, cuts)
        torch.testing.assert_close(found, torch.stack(expected), atol=5e-4, rtol=2e-3)


@pytest.mark.parametrize("budget", [None, 12])
@pytest.mark.parametrize("kind", ["eagle3", "specblock"])
def test_the_text_is_the_targets(tmp_path, target, kind, budget):
    if kind == "eagle3":
        folder = safeailab(tmp_path, eagle3_tensors())
    else:
        fields = {**LAYER, "num_hidden_layers": 2, "diffspec_draft_token_num": 3, "draft_vocab_size": DRAFTED}
        folder = saved(tmp_path, fields, specblock_tensors())
    drafter = load_drafter(folder, target=target, dtype=torch.float32)
    ids = prompt(9)
    plain = target.generate(ids, max_new_tokens=24, do_sample=False)
    drafter.bind(target)
    out = target.generate(ids, max_new_tokens=24, do_sample=False, assistant_model=drafter, tree_budget=budget)
    assert torch.equal(out, plain) and drafter.last_stats.rounds
    drafter.save_pretrained(tmp_path / "ours")
    again = load_drafter(tmp_path / "ours", dtype=torch.float32)
    assert {name: value.shape for name, value in again.state_dict().items()} == {
        name: value.shape for name, value in drafter.state_dict().items()
    }
    drafter.unbind(target)


def specblock(folder, tensors):
    fields = {"num_hidden_layers": 2, "diffspec_draft_token_num": 3, "draft_vocab_size": DRAFTED}
    return saved(folder, {**LAYER, **fields}, tensors)


@pytest.mark.parametrize("layout", ["safeailab", "speculators", "specblock"])
def test_others_drafters_are_trained_on(tmp_path, target, layout):
    """For a target that was fine-tuned: what was read is trained, its vocabulary stays, and it is saved and drafts."""
    made = {"specblock": specblock, **WRITTEN}[layout]
    tensors = specblock_tensors() if layout == "specblock" else eagle3_tensors()
    embedding = {"embed_tokens.weight": target.get_input_embeddings().weight.detach().clone()}
    drafter = load_drafter(made(tmp_path, tensors | embedding), dtype=torch.float32)
    before = {name: value.clone() for name, value in drafter.state_dict().items()}
    assert drafter.config.own_embedding and drafter.config.draft_vocab_size == DRAFTED
    texts = target.generate(prompt(9).repeat(3, 1), max_new_tokens=20, do_sample=True, pad_token_id=0)
    data = [{"input_ids": text, "loss_mask": [int(i > 8) for i in range(29)]} for text in texts.tolist()]
    trainer = trainer_for(tmp_path / "out", target, drafter, data, data, recipe="ours", max_steps=20)
    start = trainer.evaluate()["eval_loss"]
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < 0.9 * start
    trainer.save_model()
    trained = load_drafter(tmp_path / "out", dtype=torch.float32)
    same = {name for name, value in trained.state_dict().items() if torch.equal(value, before[name])}
    assert same == {"embed_tokens.weight", "draft_ids"}
    plain = target.generate(prompt(9), do_sample=False, max_new_tokens=20)
    trained.bind(target)
    out = target.generate(prompt(9), do_sample=False, max_new_tokens=20, assistant_model=trained)
    trained.unbind(target)
    assert torch.equal(out, plain)


def test_a_pickle_of_tensors_is_read_without_running_code(tmp_path, target):
    tensors = eagle3_tensors()
    folder = safeailab(tmp_path, tensors)
    (folder / "model.safetensors").unlink()
    torch.save(tensors, folder / "pytorch_model.bin")
    drafter = load_drafter(folder, dtype=torch.float32)
    assert torch.equal(drafter.state_dict()["norm.weight"], tensors["norm.weight"])


def test_an_embedding_that_is_no_copy_is_kept(tmp_path, target):
    own = target.get_input_embeddings().weight.detach()
    for given, is_own in ((own.clone(), False), (own + 1, True)):
        folder = safeailab(tmp_path, eagle3_tensors() | {"embed_tokens.weight": given})
        drafter = load_drafter(folder, target=target, dtype=torch.float32)
        assert drafter.config.own_embedding == is_own
        assert torch.equal(drafter.embed(target_of(target), torch.tensor([[5]]))[0, 0], given[5])
    assert load_drafter(folder).config.own_embedding  # nothing to compare with


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"norm_output": False}, "norm_output"),
        ({"eagle_config": {IDS: [4, 1]}}, "ascending"),
        ({"hidden_size": None}, "hidden_size"),
        (
            {"eagle_config": {"use_aux_hidden_state": False, IDS: []}},
            "`use_aux_hidden_state` .* False, .*expected True",
        ),
        ({"use_aux_hidden_state": False}, "`use_aux_hidden_state`"),
        ({"eagle_config": {"use_last_layernorm": False}}, "`use_last_layernorm` .*expected True"),
        ({"eagle_config": {"use_mtp_layernorm": True}}, "`use_mtp_layernorm` .*expected False"),
        ({"eagle_config": {"use_input_layernorm_in_first_layer": False}}, "`use_input_layernorm_in_first_layer`"),
        ({"eagle_config": {"parallel_draft_step": 3}}, "`parallel_draft_step` .* 3, .*expected 0, 1"),
        ({"eagle_config": {"next_layer_regular": False}}, "`next_layer_regular`"),
        ({"eagle_config": {"eh_proj_before_attn": True}}, "`eh_proj_before_attn` .* True, and nothing is known"),
        ({"eagle_config": [1, 2]}, "`eagle_config` .* expected a dictionary"),
        ({"target_layer_ids": [0, 2, 5]}, "says twice which layers it reads"),
        ({IDS: [1, 3, 4]}, "says twice which layers it reads"),
        ({"eagle_config": {IDS: [-1, 2, 5]}}, r"names layers \[-1, 2, 5\], expected numbers from 0"),
        ({"eagle_config": None, IDS: [-1, 2, 4]}, "reads layers"),
        ({"num_aux_hidden_states": 5}, "`num_aux_hidden_states` .* 5, but it reads 3"),
        ({"norm_before_fc": True}, "`norm_before_fc`"),
        ({"is_causal": False}, "`is_causal`"),
        ({"logit_scale": 0.25}, "`logit_scale`"),
        ({"partial_rotary_factor": 0.01}, "`partial_rotary_factor`"),
        ({"mlp_bias": True}, "`mlp_bias`"),
        ({"final_logit_softcapping": -30.0}, "`final_logit_softcapping`"),
        ({"parallel_drafting": True}, "`parallel_drafting`"),
        ({"ptd_token_id": 5}, "`ptd_token_id`"),
        ({"mask_token_id": 5}, "`mask_token_id`"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantized by fp8"),
        ({"layer_types": ["sliding_attention"], "sliding_window": 8}, "sliding attention"),
        ({"use_sliding_window": True, "sliding_window": 8}, "sliding attention"),
        ({"architectures": ["Gemma4Eagle3Model"]}, "Gemma4Eagle3Model, whose layers"),
        ({"architectures": ["Eagle3DeepseekV2ForCausalLM"]}, "whose layers"),
        ({"architectures": ["PEagleDraftModel"]}, r"a kind that is not read \(P-EAGLE\)"),
    ],
)
def test_what_cannot_be_reproduced_is_refused(tmp_path, more, told):
    with pytest.raises(ValueError, match=told):
        load_drafter(safeailab(tmp_path, eagle3_tensors(), **more))


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"rank_classes": 5}, "`rank_classes`"),
        ({"is_causal": False}, "`is_causal`"),
        ({"attention_multiplier": 2.0}, "`attention_multiplier`"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "`use_aux_hidden_state`"),
    ],
)
def test_what_cannot_be_reproduced_of_specblock_is_refused(tmp_path, more, told):
    folder = specblock(tmp_path, specblock_tensors())
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**fields, "_comment": "that is none", **more}))
    with pytest.raises(ValueError, match=told):
        load_drafter(folder)


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"architectures": ["EagleLlamaForCausalLM"], "model_type": "llama"}, "EAGLE-1 or EAGLE-2"),
        ({"model_type": "eagle", "architectures": ["EAGLEModel"]}, "EAGLE-1 or EAGLE-2"),
        ({"speculators_model_type": "eagle", "transformer_layer_config": {}}, "EAGLE-1 or EAGLE-2"),
        ({"architectures": ["MedusaModel"], "model_type": "medusa"}, "Medusa as a whole model or for vLLM"),
        ({"architectures": ["MLPSpeculatorPreTrainedModel"], "model_type": "mlp_speculator"}, "MLP speculator"),
        ({"architectures": ["PEagleDraftModel"], "draft_vocab_size": 40, "model_type": "llama"}, "P-EAGLE"),
        ({"speculators_model_type": "peagle"}, "P-EAGLE"),
    ],
)
def test_drafters_of_another_kind_are_no_targets(tmp_path, fields, kind):
    saved(tmp_path, fields, {"fc.weight": torch.zeros(2, 4)})
    for load in (load_drafter, load_target):
        with pytest.raises(ValueError, match=f"a kind that is not read .{kind}.") as caught:
            load(tmp_path)
        assert "hf-hyperdflash train" not in str(caught.value)


@pytest.mark.parametrize("pickled", [False, True])
def test_eagle1_is_known_by_its_tensors(tmp_path, pickled):
    """Its config.json, SafeAILab's, is that of a Llama of one layer."""
    tensors = {"fc.weight": torch.zeros(WIDTH, 2 * WIDTH), "embed_tokens.weight": torch.zeros(VOCABULARY, WIDTH)}
    tensors |= {**attention("layers.0", WIDTH), **mlp("layers.0"), "layers.0.post_attention_layernorm.weight": norm()}
    folder = saved(tmp_path, {**LAYER, "architectures": ["LlamaForCausalLM"]}, tensors)
    if pickled:
        (folder / "model.safetensors").unlink()
        torch.save(tensors, folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"a kind that is not read \(EAGLE-1 or EAGLE-2\): expected DFlash, "):
        load_drafter(folder)
    with pytest.raises(ValueError, match=r"a kind that is not read \(EAGLE-1 or EAGLE-2\), expected the target"):
        load_target(folder)


def test_eagle3_that_says_nothing_of_it_is_told_what_to_say(tmp_path, target):
    folder = saved(tmp_path, {**LAYER, "architectures": ["LlamaForCausalLM"]}, eagle3_tensors())
    for load in (load_drafter, load_target):
        with pytest.raises(ValueError, match=r"an EAGLE-3 drafter by its tensors.*`\"architectures\": \[\"Llama"):
            load(folder)
    llama().save_pretrained(tmp_path / "target")
    load_target(tmp_path / "target")


def test_too_shallow_a_target_is_refused(tmp_path, target):
    drafter = load_drafter(specblock(tmp_path, specblock_tensors()), dtype=torch.float32)
    with pytest.raises(ValueError, match="at least 8 layers"):
        drafter.bind(qwen3())


@pytest.mark.parametrize("layout", ["safeailab", "specblock"])
def test_others_drafters_are_carded_pushed_and_exported_once_they_are_saved(tmp_path, layout):
    """Each command says so before; afterwards card and push are of ours, not their file's, and know no target yet."""
    made, tensors = {"safeailab": (safeailab, eagle3_tensors()), "specblock": (specblock, specblock_tensors())}[layout]
    (theirs := tmp_path / "theirs").mkdir()
    fields = {"eagle_config": None} if layout == "safeailab" else {}
    made(theirs, tensors, **fields)
    (theirs / "README.md").write_text("Serve it with SGLang.")
    run = CliRunner()
    for command in (["card", theirs], ["push", theirs, "org/drafter", "--dry-run"]):
        result = run.invoke(app, [str(word) for word in command])
        told = f"saved by this package: save it first, `load_drafter('{theirs}').save_pretrained(FOLDER)`."
        assert told in str(result.exception)
    drafter = load_drafter(theirs)
    assert "README.md (a new one" in planned_push(drafter, "org/drafter")
    drafter.save_pretrained(tmp_path / "ours")
    result = run.invoke(app, ["card", str(tmp_path / "ours"), "--target", "org/target", "--repo-id", "org/drafter"])
    card = (tmp_path / "ours" / "README.md").read_text()
    assert result.exit_code == 0 and "deepseek" not in card and 'from_pretrained("org/target"' in card
    assert "after layer 1, one in the middle and the fourth from the end" in card
    assert run.invoke(app, ["push", str(tmp_path / "ours"), "org/drafter", "--dry-run"]).exit_code == 0
    result = run.invoke(app, ["export", str(theirs), str(tmp_path / "export")])
    assert "expected a HyperDFlash drafter, saved by this package." in str(result.exception)


def test_others_drafters_know_no_target_until_they_are_trained_for_one(tmp_path, target):
    drafter = load_drafter(safeailab(tmp_path, eagle3_tensors()), dtype=torch.float32)
    with pytest.raises(ValueError, match=r"but this target's is 32. Load the drafter's own target or make") as caught:
        drafter.check_target(target_of(tiny_target()))
    assert "deepseek" not in str(caught.value)
    drafter.check_target(target_of(target))
    assert drafter.config.target_model_type == "" and drafter.config.target_num_layers == 0


@pytest.mark.parametrize("parts", [{}, {"fc_norm": True}])
def test_of_a_target_with_several_streams_the_mean_is_read(tmp_path, parts):
    """As those who publish EAGLE-3 for DeepSeek-V4 train it: the mean over the streams of each layer."""
    target = tiny_target(layer_types=["sliding_attention"] * 8, hidden_size=WIDTH)
    tensors = eagle3_tensors(**parts)
    fields = {"vocab_size": target.config.vocab_size, "draft_vocab_size": DRAFTED, **parts}
    drafter = load_drafter(safeailab(tmp_path, tensors, **fields), target=target, dtype=torch.float32)
    check_eagle3(drafter, target, tensors, fc_norm=bool(parts))
