"""Others' drafters on random weights, in each layout as it is released, and whether ours draft what the oracles do.

`LAYOUTS` is the table: who wrote a drafter, what writes a random one, and what compares its drafts. A new layout is a
row, or a few. SafeAILab's EAGLE-3 and SpecBlock are written here; the oracles write the others.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModel,
    GenerationConfig,
    LogitsProcessorList,
    MuseGlimmerAssistantConfig,
    MuseGlimmerAssistantModel,
)
from transformers.generation.candidate_generator import DFlashTokenCandidateGenerator

from hf_hyperdflash import capture_residual
from hf_hyperdflash.drafters.blocks import drafter as block_drafter
from hf_hyperdflash.drafters.deepseek_v4 import modeling_mtp
from hf_hyperdflash.drafters.sampling import DraftRequest, DraftSampler
from hf_hyperdflash.drafters.unrolled import drafter as unrolled_drafter
from hf_hyperdflash.drafters.unrolled.drafter import UnrolledDrafter
from hf_hyperdflash.targets.registry import target_of
from hf_hyperdflash.trees.growth import DraftStep
from hf_hyperdflash.trees.tree import DraftTree

from ..conftest import CSA, HCA, SLIDING, prompt, tiny_target
from . import oracle_dflash, oracle_eagle3, oracle_layouts, oracle_specblock
from .families import deepseek_v4, gemma2, gemma3, glm5_next, muse_glimmer, qwen3

Tensors = dict[str, torch.Tensor]
EMBEDDINGS = -1_000_000  # what enters the target's first layer, as `target_layer_ids` calls it
IDS = "eagle_aux_hidden_state_layer_ids"


# Drafters of blocks: rounds of a text, each against `oracle_layouts`


class Round(NamedTuple):
    """One call of `draft`: the text, the generator's state before, and what was drafted."""

    ids: torch.Tensor
    state: torch.Tensor
    tree: Any


def rounds(drafter: Any, target: Any, temperature: float) -> list[Round]:
    """Those of a text, of which greedily there is but one: the target's."""
    seen: list[Round] = []
    draft, ids = type(drafter).draft, prompt(12)

    def telling(self, target, requests):
        state = torch.get_rng_state()
        (tree,) = draft(self, target, requests)
        seen.append(Round(requests[0].ids.clone(), state, tree))
        return [tree]

    sampling = dict(do_sample=True, temperature=temperature, top_k=0) if temperature else dict(do_sample=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(drafter), "draft", telling)
        drafter.bind(target)
        text = target.generate(ids, max_new_tokens=12, assistant_model=drafter, **sampling)
        drafter.unbind(target)
    if not temperature:
        assert torch.equal(text, target.generate(ids, max_new_tokens=12, do_sample=False))
    return seen


def check_rounds(drafter: Any, target: Any, folder: Path, temperatures: tuple[float, ...] = (0.0, 0.7)) -> None:
    """Greedily, and drawn with the same draws from the same distributions."""
    read = oracle_layouts.read_any(folder, oracle_dflash.read(folder)[0])
    assert drafter.num_draft_tokens == read.block_size - read.first
    for temperature in temperatures:
        seen = rounds(drafter, target, temperature)
        assert len(seen) > 2
        for ids, state, tree in seen:
            torch.set_rng_state(state)
            expected = oracle_layouts.draft(folder, target, ids, len(tree.tokens), temperature)
            assert tree.tokens.tolist() == expected.tokens
            if temperature:
                torch.testing.assert_close(torch.stack(tree.q), expected.q, atol=1e-4, rtol=1e-4)
            if expected.confidence is None:
                assert tree.confidence is None
            else:
                torch.testing.assert_close(tree.confidence, expected.confidence, atol=1e-4, rtol=1e-4)


# EAGLE-3 and SpecBlock: tensors by their publishers' names, and logits along a path

LAYERS, WIDTH, VOCABULARY, DRAFTED = [1, 3, 4], 64, 64, 40
LAYER = {
    "vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 48, "hidden_act": "silu", "rms_norm_eps": 1e-6,
    "max_position_embeddings": 512, "rope_theta": 5000.0, "model_type": "llama", "tie_word_embeddings": False,
}  # fmt: skip


def layer(
    prefix: str, reads: int, norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
) -> Tensors:
    shapes = {f"self_attn.{part}_proj": (64 if part == "q" else 32, reads) for part in "qkv"}
    shapes |= {"self_attn.o_proj": (WIDTH, 64), "mlp.down_proj": (WIDTH, 48)}
    shapes |= {f"mlp.{part}_proj": (48, WIDTH) for part in ("gate", "up")}
    tensors = {f"{prefix}.{name}.weight": torch.randn(*shape) / 8 for name, shape in shapes.items()}
    return tensors | {f"{prefix}.{name}.weight": norm() for name in norms}


def norm(width: int = WIDTH) -> torch.Tensor:
    return 1 + torch.randn(width) / 10


def truncated() -> Tensors:
    ids = torch.randperm(VOCABULARY)[:DRAFTED].sort().values
    kept = torch.zeros(VOCABULARY, dtype=torch.bool).index_fill_(0, ids, True)
    return {"d2t": ids - torch.arange(DRAFTED), "t2d": kept, "lm_head.weight": torch.randn(DRAFTED, WIDTH) / 4}


def eagle3_tensors(
    qk_norm=False, norm_before_fc=False, fc_norm=False, layers=1, reads=3, mask: tuple[int, ...] = ()
) -> Tensors:
    torch.manual_seed(1)
    parts = ("hidden_norm", "input_layernorm", "post_attention_layernorm")
    tensors = {**layer("midlayer", 2 * WIDTH, parts), **truncated(), "norm.weight": norm()}
    tensors["fc.weight"] = torch.randn(WIDTH, reads * WIDTH) / 8
    if qk_norm:
        tensors |= {f"midlayer.self_attn.{part}_norm.weight": norm(16) for part in "qk"}
    if norm_before_fc:
        tensors["input_norm.weight"] = norm(3 * WIDTH)
    if fc_norm:
        tensors |= {f"fc_norm.{i}.weight": norm() for i in range(3)}
    for i in range(1, layers):
        tensors |= layer(f"layers.{i}", WIDTH)
    if mask:
        tensors["mask_hidden"] = torch.randn(*mask)
    return tensors


def specblock_tensors(layers=2, slots=3) -> Tensors:
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
        tensors |= layer(f"layers.{i}", WIDTH)
        if i:
            tensors[f"shift_proj.{i - 1}.weight"] = torch.randn(WIDTH, 2 * WIDTH) / 8
    return tensors | truncated()


def whole_vocabulary(tensors: Tensors, **more: torch.Tensor) -> Tensors:
    """The same without lists of tokens and without the head that goes with them, and with more tensors."""
    kept = {name: tensor for name, tensor in tensors.items() if name not in ("d2t", "t2d", "lm_head.weight")}
    return kept | {f"{name}.weight": tensor for name, tensor in more.items()}


def saved(folder: Path, fields: dict[str, Any], tensors: Tensors) -> Path:
    folder.mkdir(exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


def safeailab(folder: Path, tensors: Tensors, **more: Any) -> Path:
    fields = {**LAYER, "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": DRAFTED}
    return saved(folder, {**fields, "eagle_config": {IDS: LAYERS}, **more}, tensors)


def speculators(folder: Path, tensors: Tensors, kind: str = "llama", **more: Any) -> Path:
    named = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
    fields = {
        "speculators_model_type": "eagle3", "architectures": ["Eagle3Speculator"], "draft_vocab_size": DRAFTED,
        "transformer_layer_config": {**LAYER, "model_type": kind},
        "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "some/qwen3"}},
        IDS: [layer + 1 for layer in LAYERS], **more,
    }  # fmt: skip
    return saved(folder, fields, named)


def deepspec(folder: Path, tensors: Tensors, **more: Any) -> Path:
    """Its layers are Qwen3's, it drafts every token and has copies of the target's embedding and head."""
    fields = {
        **LAYER, "architectures": ["Qwen3Eagle3Model"], "model_type": "qwen3", "target_layer_ids": [0, 1, 3, 5, 6],
        "ttt_length": 7, "step_loss_decay": 0.8, "draft_num_hidden_layers": 1, "num_target_layers": 8,
        "layer_types": ["full_attention"], "target_model_name_or_path": "Qwen/Qwen3-4B", "use_sliding_window": False,
    }  # fmt: skip
    named = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
    return saved(folder, {**fields, **more}, named)


def automodel(folder: Path, tensors: Tensors, **more: Any) -> Path:
    """NVIDIA's NeMo AutoModel's P-EAGLE, whose layers are in a `model`."""
    outside = ("lm_head.weight", "mask_hidden", "d2t", "t2d")
    inner = {name: tensors.pop(name) for name in [*tensors] if name not in outside}
    named = {f"model.{name.replace('midlayer.', 'layers.0.')}": tensor for name, tensor in inner.items()}
    fields = {
        **LAYER, "architectures": ["LlamaEagle3DraftModel"], "parallel_drafting": True, "mask_token_id": 5,
        "num_depths": 6, "down_sample_ratio": 0.7, "down_sample_ratio_min": 0.2, "num_hidden_layers": 2,
        "draft_vocab_size": DRAFTED, "eagle_config": {IDS: LAYERS},
    }  # fmt: skip
    return saved(folder, {**fields, **more}, {**named, **tensors})


def specblock(folder: Path, tensors: Tensors, **more: Any) -> Path:
    fields = {**LAYER, "num_hidden_layers": 2, "diffspec_draft_token_num": 3, "draft_vocab_size": DRAFTED}
    return saved(folder, {**fields, **more}, tensors)


def medusa(folder: Path, tensors: Tensors | None = None, **more: Any) -> Path:
    torch.manual_seed(3)
    for k in range(2):
        tensors = tensors or {}
        tensors |= {f"{k}.0.linear.weight": torch.randn(WIDTH, WIDTH), f"{k}.0.linear.bias": torch.randn(WIDTH)}
        tensors[f"{k}.1.weight"] = torch.randn(VOCABULARY, WIDTH)
    saved(folder, {"medusa_num_heads": 2, "base_model_name_or_path": "org/its-target", **more}, tensors or {})
    return (folder / "model.safetensors").rename(folder / "medusa_lm_head.safetensors")


@torch.no_grad()
def read(target: Any, ids: torch.Tensor, layers=LAYERS) -> tuple[torch.Tensor, torch.Tensor]:
    """Features of every token, `[seq, layers * width]`, the mean over the streams of each layer, and embeddings of the
    tokens after."""
    with capture_residual(target, layers) as captured:
        target(ids)
    return captured[0][0].unflatten(1, (len(layers), -1)).mean(2).flatten(1), target.get_input_embeddings()(ids[0, 1:])


@contextmanager
def each_grown_alone() -> Iterator[None]:
    """Let samplers see the steps of drafters, whose drafts the package draws in step."""

    def drafts(requests: Any, steps: Any, width: Any = None) -> list[DraftTree]:
        return [each.sampler.grow(each.ids, each.num_drafts, steps) for each in requests]

    with pytest.MonkeyPatch.context() as patched:
        for module in (block_drafter, modeling_mtp, unrolled_drafter):
            patched.setattr(module, "draft_batch", drafts)
        yield


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
        return DraftTree.chain(ids.new_empty(0))

    def draft_independent(self, ids, logits):
        first = len(self.seen)
        self.seen += logits[0]
        taken = [*self.tokens, self.tokens[-1]][first : len(self.seen)]  # nothing follows the last
        return DraftTree.chain(torch.tensor(taken))


@torch.no_grad()
def drafted(drafter: Any, target: Any, ids: torch.Tensor, tokens: list[int], parts=(1,)) -> torch.Tensor:
    """Logits `[drafts, vocabulary]` along a path of given tokens, the text taken in in several parts."""
    with capture_residual(target, drafter.layers_read(target_of(target))) as captured:
        target(ids[:, :-1])
    context, positions = drafter.new_context(), torch.arange(ids.shape[1])[None]
    for start, stop in pairwise([0, *parts, ids.shape[1] - 1]):
        part = slice(start, stop)
        drafter.extend(
            target_of(target), context, captured[0][:, part], positions[:, part], ids[:, start + 1 : stop + 1]
        )
    if isinstance(drafter, UnrolledDrafter):  # whose next round would take in what is pending
        drafter.flush_pending(target_of(target), [context])
    held = context.length
    sampler = Followed(tokens)
    with each_grown_alone():
        drafter.draft(target_of(target), [DraftRequest(context, ids, positions, len(tokens) + 1, sampler)])
    assert context.length == held  # as it was
    return torch.stack(sampler.seen)


@torch.no_grad()
def check_eagle3(
    drafter: Any, target: Any, tensors: Tensors, layers=LAYERS, mask: int | None = None, **flags: Any
) -> None:
    """Logits along a path, against loops over the tensors as their publisher names them; of P-EAGLE with the token
    `mask` in place of the path."""
    tensors = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in tensors.items()}
    ids, tokens = prompt(12), [7, 9, 9, 30]
    shape = oracle_eagle3.Shape(4, 2, 16, 1e-6, 5000.0, **flags)
    features, _ = read(target, ids, layers)
    table = tensors.get("embed_tokens.weight", target.get_input_embeddings().weight).detach()
    embeds = torch.stack([table[token] for token in ids[0, 1:].tolist()])
    known, path = oracle_eagle3.entries(tensors, shape, features[:-1], embeds), []
    expected = [oracle_eagle3.target_logits(tensors, shape, known[-1].out, VOCABULARY)]
    if mask is not None:
        path = oracle_eagle3.masked(tensors, shape, known, table[mask], len(tokens))
    for token in tokens if mask is None else ():
        path.append(oracle_eagle3.further(tensors, shape, known, path, table[token]))
    expected += [oracle_eagle3.target_logits(tensors, shape, each.out, VOCABULARY) for each in path]
    drafter.check_target(target_of(target))
    assert drafter.layers_read(target_of(target)) == layers
    for cuts in ((1,), (3, 8)):
        found = drafted(drafter, target, ids, tokens, cuts)
        torch.testing.assert_close(found, torch.stack(expected), atol=2e-4, rtol=1e-3)


def check_eagle3_file(drafter: Any, target: Any, folder: Path, layers=LAYERS, count: int = 1, **flags: Any) -> None:
    """Against what is in the folder. A head that is not there is the embedding, if they are tied, or the target's."""
    read, fields = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    tensors = {name.removeprefix("model."): tensor for name, tensor in read.items()}
    if "lm_head.weight" not in tensors:
        head = target.get_output_embeddings().weight.detach()
        tensors["lm_head.weight"] = tensors["embed_tokens.weight"] if fields.get("tie_word_embeddings") else head
    tensors.setdefault("d2t", torch.zeros(VOCABULARY, dtype=torch.long))
    assert drafter.config.num_hidden_layers == count
    check_eagle3(drafter, target, tensors, layers, **flags)


def assistant(folder: Path, _: Any = None, **fields: Any) -> None:
    """Muse-Glimmer's, by transformers' own class."""
    shape = dict(
        hidden_size=WIDTH, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, max_position_embeddings=1024, sliding_window=6, block_size=5, mask_token_id=1,
        target_layer_ids=[0, 2],
    )  # fmt: skip
    torch.manual_seed(4)
    model = MuseGlimmerAssistantModel(MuseGlimmerAssistantConfig(**{**shape, **fields}))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) / 8)
    model.save_pretrained(folder)


@torch.no_grad()
def check_assistant(drafter: Any, target: Any, folder: Path) -> None:
    """Logits of rounds that take in one token or several, beside those of transformers' own DFlash loop."""
    model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    embedding, head, seen = target.get_input_embeddings(), target.get_output_embeddings(), target_of(target)
    theirs = DFlashTokenCandidateGenerator(model, embedding, head, GenerationConfig(max_length=99, do_sample=False))
    ids, positions, layers, start = prompt(40), torch.arange(40)[None], drafter.layers_read(seen), 0
    drafter.check_target(seen)
    with capture_residual(target, layers) as captured:
        target(ids)
    context, count = drafter.new_context(), drafter.max_draft_tokens
    for length in (5, 6, 9, 10, 14, 22, 40):
        new = slice(start, length - 1)
        # Layer 0 is `hidden_states[1]`; transformers 5.17 looks for it in `hidden_states[0]`.
        states = {i: captured[0][:, new, place] for place, layer in enumerate(layers) for i in (layer, layer + 1)}
        text = {"position_ids": positions[:, :length], "attention_mask": torch.ones(1, length, dtype=torch.long)}
        outputs = SimpleNamespace(hidden_states=states)
        _, expected = theirs.get_candidates(ids[:, :length], text, outputs, False, length - 2 - start)
        drafter.extend(seen, context, captured[0][:, new], positions[:, new], ids[:, start + 1 : length])
        sampler = Followed([0] * count)
        drafter.draft(seen, [DraftRequest(context, ids[:, :length], positions[:, :length], count, sampler)])
        expected = seen.after_head(expected[0])
        expected[:, drafter.config.mask_token_id] = -torch.inf  # which ours never drafts
        torch.testing.assert_close(torch.stack(sampler.seen), expected, atol=1e-4, rtol=1e-4)
        start = length - 1


@torch.no_grad()
def check_specblock(drafter: Any, target: Any, folder: Path, off: tuple[str, ...] = (), **shape: Any) -> None:
    """Blocks that go on from blocks that go on from blocks, along a path, against loops. `off` is what the drafter is
    without."""
    tensors, slots = load_file(folder / "model.safetensors"), 3
    drafter.check_target(target_of(target))
    assert drafter.config.usual_layers and drafter.layers_read(target_of(target)) == LAYERS
    drafter.config.shift, drafter.config.broadcast = "shift" not in off, "broadcast" not in off
    ids, tokens = prompt(12), [7, 9, 9, 30, 2, 11, 5]
    shape = oracle_specblock.Shape(4, 2, 16, 2, slots, 1e-6, 5000.0, **shape)
    features, embeds = read(target, ids)
    known = oracle_specblock.blocks(tensors, shape, features[:-1], embeds, frozenset(off))
    last, path, expected = known[-1], [], []
    kept, table = tensors["t2d"].nonzero().flatten(), target.get_input_embeddings()
    for k in range(len(tokens) + 1):
        if k and k % slots == 0:
            path.append((last, slots - 1))
            embed = table(torch.tensor(tokens[k - 1]))
            last = oracle_specblock.later_block(tensors, shape, known, len(known) - 1, path, embed, frozenset(off))
        logits = oracle_specblock.logits(tensors, shape, last.hidden[k % slots])
        expected.append(torch.full((VOCABULARY,), -torch.inf).index_copy(0, kept, logits))
    for cuts in ((1,), (3, 8)):
        found = drafted(drafter, target, ids, tokens, cuts)
        torch.testing.assert_close(found, torch.stack(expected), atol=5e-4, rtol=2e-3)


# The table


class Layout(NamedTuple):
    """Who wrote a drafter.

    Attributes:
        write: Writes a random one for a target into a folder.
        check: Compares its drafts for a target with an oracle's reading of the folder.
        target: Makes its target.
        written: The layouts that have words for it; `None` if it is no drafter of blocks.
    """

    write: Callable[[Path, Any], Any]
    check: Callable[[Any, Any, Path], None]
    target: Callable[[], Any]
    written: tuple[str, ...] | None = None


ROLES: dict[str, Any] = {"block_size": 5, "mask_token_id": 1}
WRITE_ZLAB = partial(oracle_dflash.write_zlab, **ROLES)
WRITE_SPECULATORS = partial(oracle_dflash.write_speculators, **ROLES)
DEEPSPEC = partial(oracle_layouts.write_dspark, layout="deepspec", layer_ids=[0, 2], **ROLES)
SPECFORGE = partial(oracle_layouts.write_dspark, layout="specforge", layer_ids=[0, 2], **ROLES)
DOMINO = partial(oracle_layouts.write_domino, layer_ids=[0, 2], **ROLES)
DSPARK = partial(oracle_layouts.write_dspark, layout="speculators", layer_ids=[1, 3], **ROLES)
DFLASH2 = partial(oracle_layouts.write_dflash2, layout="z-lab", layer_ids=[0, 2], **ROLES)
DFLASH2_SPECULATORS = partial(oracle_layouts.write_dflash2, layout="speculators", layer_ids=[1, 3], **ROLES)
BOTH, DSPARKS, SPECULATORS_ALONE = ("z-lab", "speculators"), ("speculators", "deepspec"), ("speculators",)


def of_blocks(write: Callable[..., Any], written: tuple[str, ...], target=qwen3, **options: Any) -> Layout:
    return Layout(partial(write, **options), check_rounds, target, written)


def zlab(written: tuple[str, ...] = ("z-lab",), nested: bool = True, layer_ids=(1,), **options: Any) -> Layout:
    return of_blocks(WRITE_ZLAB, written, nested=nested, layer_ids=list(layer_ids), **options)


def eagle3(
    write: Callable[..., Any], parts: dict[str, Any], fields: dict[str, Any], layers=LAYERS, has: str | None = None,
    **flags: Any,
) -> Layout:  # fmt: skip
    """`has` is what a file for the whole vocabulary has of embedding and head."""

    def made(folder: Path, _: Any) -> None:
        tensors = eagle3_tensors(**parts)
        if has is not None:
            tensors = whole_vocabulary(tensors, **{name: torch.randn(VOCABULARY, WIDTH) / 4 for name in has.split()})
        write(folder, tensors, **fields)

    return Layout(made, partial(check_eagle3_file, layers=layers, **flags), partial(qwen3, layers=8))


def flat(layers=LAYERS, **fields: Any) -> Layout:
    """SafeAILab's file as others publish it, without its names."""
    return eagle3(safeailab, {}, {"architectures": None, "eagle_config": None, **fields}, layers)


def changed(write: Callable[..., Any], section: str | None = None, **fields: Any) -> Callable[..., Any]:
    """What writes the same, with other fields at the top of its config.json or in a section; `None` takes one out."""

    def written(folder: Path, target: Any, **options: Any) -> None:
        write(folder, target, **options)
        config = json.loads((folder / "config.json").read_text())
        place = config if section is None else config[section]
        place |= fields
        for name in [name for name, value in fields.items() if value is None]:
            del place[name]
        (folder / "config.json").write_text(json.dumps(config))

    return written


def capped() -> Any:
    target = gemma2()
    target.config.final_logit_softcapping = CAP["final_logit_softcapping"]
    return target


def of_v4(**fields: Any) -> Callable[[], Any]:
    return partial(tiny_target, hidden_size=WIDTH, **fields)


HUNYUAN = {
    "attention_head_dim": 128, "cla_share_factor": 2, "class_num": 0, "dense_list": [64, 0], "eod_token_id": 3,
    "mask_init_id": 12, "norm_type": "rms", "org_vocab_size": 64, "pool_type": "last", "use_cla": False,
    "use_qk_norm": True, "use_rotary_pos_emb": True, "im_end_id": 5, "tie_word_embeddings": True,
}  # fmt: skip
NVIDIA = {
    "use_aux_hidden_state": True, "use_input_layernorm_in_first_layer": True, "use_last_layernorm": True,
    "use_mtp_layernorm": False, "next_layer_regular": True, "parallel_draft_step": 1,
    "parallel_draft_heads_num_layers": 1, IDS: [0, 2, 5],
}  # fmt: skip
# A part of each head turns, as files say it: where RoPE is, beside it, and with M-RoPE, which is plain RoPE for text.
PART: dict[str, Any] = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
PARTS: dict[str, dict[str, Any]] = {
    "in its RoPE": {"rope_parameters": PART},
    "beside its RoPE": {"rope_theta": 1e4, "rope_scaling": None, "partial_rotary_factor": 0.25},
    "linear": {"rope_parameters": {**PART, "rope_type": "linear", "factor": 4.0}},
    "linear, as earlier": {"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 4.0},
                           "partial_rotary_factor": 0.75},
    "M-RoPE": {"rope_parameters": {**PART, "mrope_section": [2, 1, 1], "mrope_interleaved": True}},
}  # fmt: skip
PART_OF_EAGLE3 = {"rope_theta": 5000.0, "partial_rotary_factor": 0.5}
CAP = {"final_logit_softcapping": 2.0}  # of logits of about that, so that it shows
OF_LAYER = "transformer_layer_config"
LLAMA, EAGLE3_1 = {"architectures": ["LlamaForCausalLM"]}, {"fc_norm": True, "norm_output": True}
MROPE = {"mrope_section": [2, 1, 1]}
NAMED = {"architectures": ["LlamaForCausalLMSpecBlock"], "rank_classes": 4}
FIVE = {"qk_norm": True, "reads": 5}
LAYOUTS: dict[str, Layout] = {
    # z-lab's and speculators' DFlash. With a window every layer but the last slides.
    "z-lab": zlab(BOTH, layer_ids=(1, 2)),
    "z-lab flat": zlab(BOTH, nested=False, layer_ids=(0, 2)),
    "z-lab causal": zlab(is_causal=True),
    "JetSpec": zlab(layer_ids=(0, 2), nested=False, inner={"causal_head": True}),
    "JetSpec by NVIDIA": zlab(
        layer_ids=(0, 2), inner={"causal": True}, outer={"architectures": ["Qwen3DFlashDraftModel"]}
    ),
    "z-lab window": zlab(nested=False, layer_ids=(0, 2), sliding_window=6),
    "z-lab window, not causal": zlab(sliding_window=3, is_causal=False),
    "z-lab window, all causal": zlab(sliding_window=1, is_causal=True),
    "MiMo": zlab(inner={"use_swa": True, "swa_window_size": 6}),  # all layers slide, none is causal
    "NVIDIA": zlab(inner={"use_swa": True, "causal": True}, outer={"use_sliding_window": True, "sliding_window": 6}),
    "z-lab, Qwen3's window": zlab(
        outer={"layer_types": None, "use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
        is_causal=False,
    ),
    "z-lab M-RoPE": zlab(BOTH, outer={"rope_parameters": {"rope_type": "mrope", "rope_theta": 1e4, **MROPE}}),
    "z-lab M-RoPE, as earlier": zlab(
        BOTH, nested=False,
        outer={"rope_theta": 1e4, "rope_scaling": {"type": "mrope", **MROPE, "mrope_interleaved": True}},
    ),
    "z-lab from the anchor": zlab(DSPARKS, inner={"sample_from_anchor": True}),
    "z-lab embeddings": zlab(BOTH, layer_ids=(-1, 2)),
    "vLLM's ids": zlab(BOTH, layer_ids=(-1, 2), outer={IDS: [0, 3]}),
    "speculators": of_blocks(WRITE_SPECULATORS, BOTH, layer_ids=[1, 3]),
    "speculators truncated": of_blocks(WRITE_SPECULATORS, SPECULATORS_ALONE, layer_ids=[2, 3], draft_vocab_size=20),
    "speculators without copies": of_blocks(WRITE_SPECULATORS, BOTH, layer_ids=[1, 3], verifier_weights="omitted"),
    "speculators from the anchor": of_blocks(WRITE_SPECULATORS, DSPARKS, layer_ids=[1, 3], sample_from_anchor=True),
    "speculators window": of_blocks(WRITE_SPECULATORS, SPECULATORS_ALONE, layer_ids=[1], sliding_window=6),
    "speculators window, not causal": of_blocks(
        WRITE_SPECULATORS, SPECULATORS_ALONE, layer_ids=[1], sliding_window=6, sliding_window_non_causal=True
    ),
    "speculators embeddings": of_blocks(WRITE_SPECULATORS, BOTH, layer_ids=[0, 3]),
    # RedHatAI/DeepSeek-V4-Flash-speculator.dflash, which alone reads a target's streams side by side.
    "speculators, all streams": of_blocks(
        WRITE_SPECULATORS, (), deepseek_v4, layer_ids=[1, 2], sliding_window=6, streams=4, draft_vocab_size=20,
        all_slide=True,
    ),
    # A part of each head that turns.
    **{
        f"z-lab, a part {name}": zlab(BOTH, layer_ids=(0, 2), outer={"rope_parameters": None, **fields})
        for name, fields in PARTS.items()
    },
    "z-lab, a part in dflash_config": zlab(BOTH, inner={"partial_rotary_factor": 0.5}),
    **{
        f"speculators, a part {name}": of_blocks(
            changed(WRITE_SPECULATORS, OF_LAYER, **{"rope_parameters": None, **fields}), BOTH, layer_ids=[1, 3]
        )
        for name, fields in PARTS.items()
    },
    "z-lab dflash2, a part": of_blocks(changed(DFLASH2, rope_parameters=PART), BOTH),
    "speculators dflash2, a part": of_blocks(changed(DFLASH2_SPECULATORS, OF_LAYER, rope_parameters=PART), BOTH),
    # A cap on logits: the target's, and of a head of its own.
    "z-lab, capped": zlab(BOTH, layer_ids=(0, 2), inner=CAP)._replace(target=capped),
    "z-lab, capped outside": zlab(BOTH, layer_ids=(0, 2), outer=CAP)._replace(target=capped),
    "speculators truncated, capped": of_blocks(
        changed(WRITE_SPECULATORS, **CAP), SPECULATORS_ALONE, layer_ids=[1, 3], draft_vocab_size=20,
        verifier_weights="omitted",
    ),
    "speculators truncated, capped in its layers": of_blocks(
        changed(WRITE_SPECULATORS, OF_LAYER, **CAP), SPECULATORS_ALONE, capped, layer_ids=[1, 3], draft_vocab_size=20,
        verifier_weights="omitted",
    ),
    # DSpark and DFlash 2.
    "deepspec": of_blocks(DEEPSPEC, DSPARKS, confidence="markov"),
    "deepspec gated": of_blocks(DEEPSPEC, DSPARKS, head="gated"),
    "deepspec rnn": of_blocks(DEEPSPEC, DSPARKS, head="rnn", confidence="state"),
    "deepspec headless": of_blocks(DEEPSPEC, DSPARKS, head=None, confidence="state"),
    "deepspec embeddings": of_blocks(DEEPSPEC, DSPARKS, layer_ids=[-1, 1]),
    "specforge": of_blocks(SPECFORGE, DSPARKS, confidence="markov"),
    "specforge headless": of_blocks(SPECFORGE, DSPARKS, head=None),
    "specforge normalized": of_blocks(SPECFORGE, DSPARKS, head="gated", confidence="state", normalized=True),
    "speculators dspark": of_blocks(DSPARK, SPECULATORS_ALONE, draft_vocab_size=20, confidence="markov"),
    "speculators gated": of_blocks(
        DSPARK, SPECULATORS_ALONE, head="gated", sample_from_anchor=False, confidence="markov"
    ),
    "speculators rnn": of_blocks(DSPARK, DSPARKS, head="rnn", sample_from_anchor=True),
    "z-lab dflash2": of_blocks(DFLASH2, BOTH),
    "z-lab dflash2 flat": of_blocks(DFLASH2, BOTH, nested=False, top_k=5),
    "speculators dflash2": of_blocks(DFLASH2_SPECULATORS, BOTH, taps=3, group=8),
    "domino": of_blocks(DOMINO, ("z-lab",)),
    "domino, not shifted": of_blocks(DOMINO, ("z-lab",), gemma3, shifted=False, start=2),
    "domino by NVIDIA": of_blocks(DOMINO, ("z-lab",), start=None, architecture="Qwen3DFlashDraftModel"),
    "domino, early": of_blocks(DOMINO, ("z-lab",), below="logit_head."),
    # Engines hand a drafter the mean over the streams of each layer.
    "RedHatAI's GLM-5.3-Flash": of_blocks(
        DSPARK, SPECULATORS_ALONE, glm5_next, layer_ids=[1, 2, 3], confidence="markov", sliding_window=6
    ),
    "modal-labs' and incoai's GLM-5.3-Flash": of_blocks(DFLASH2, ("z-lab",), glm5_next, sliding_window=6),
    # EAGLE-3: known by its fields, whatever it calls itself; one layer, whatever it says of layers.
    "safeailab": eagle3(safeailab, {}, {}),
    "safeailab, normed layers": eagle3(safeailab, {"fc_norm": True}, EAGLE3_1, fc_norm=True),
    "safeailab embeddings": eagle3(safeailab, {}, {"eagle_config": None, IDS: [0, 3, 6]}, [EMBEDDINGS, 2, 5]),
    "SafeAILab's Vicuna": flat(**LLAMA, num_hidden_layers=40, bos_token_id=1),
    "without key heads": flat(**LLAMA, torch_dtype="float16"),
    "AngelSlim": flat(architectures=["Eagle3LlamaForCausalLM"], num_hidden_layers=24, target_model_type="qwen3"),
    "AngelSlim's Hunyuan": flat(architectures=["Eagle3LlamaForCausalLM"], **HUNYUAN),
    "AngelSlim's CosyVoice": flat(architectures=["CosyVoice3Eagle3LlamaForCausalLM"], sliding_window=32768),
    "no architecture": flat(max_window_layers=36, use_sliding_window=False, sliding_window=None),
    "vLLM's EAGLE-3": flat([0, 2, 5], architectures=["LlamaForCausalLMEagle3"], **{IDS: [1, 3, 6]}),
    "both lists": flat([0, 2, 5], eagle_config={IDS: [0, 2, 5]}, num_aux_hidden_states=3, **{IDS: [1, 3, 6]}),
    "all layers full": flat(layer_types=["full_attention"], sliding_window=8, use_sliding_window=True),
    "NVIDIA's EAGLE-3": eagle3(
        safeailab, {"layers": 3}, {"eagle_config": NVIDIA, "num_hidden_layers": 94}, [0, 2, 5], count=3
    ),
    "speculators eagle3": eagle3(speculators, {}, {}),
    "speculators eagle3, Qwen3's": eagle3(
        speculators, {"qk_norm": True}, {"kind": "qwen3", "norm_before_residual": True}, norm_before_residual=True
    ),
    "speculators eagle3, normed": eagle3(
        speculators, {"norm_before_fc": True}, {"norm_before_fc": True, "norm_output": True}, norm_before_fc=True,
        norm_output=True,
    ),
    "speculators eagle3, embeddings": eagle3(speculators, {}, {IDS: [0, 3, 6]}, [EMBEDDINGS, 2, 5]),
    "safeailab, a part": eagle3(safeailab, {}, PART_OF_EAGLE3, rotary=8),
    "speculators eagle3, a part": eagle3(speculators, {}, {OF_LAYER: {**LAYER, **PART_OF_EAGLE3}}, rotary=8),
    "safeailab, capped": eagle3(safeailab, {}, CAP, cap=2.0),
    "speculators eagle3, capped": eagle3(speculators, {}, CAP, cap=2.0),
    "speculators eagle3, capped in its layer": eagle3(speculators, {}, {OF_LAYER: {**LAYER, **CAP}}, cap=2.0),
    "deepspec eagle3": eagle3(deepspec, FIVE, {}, [0, 1, 3, 5, 6], "embed_tokens lm_head"),
    "deepspec eagle3, embeddings": eagle3(
        deepspec, FIVE, {"target_layer_ids": [-1, 1, 3, 5, 6]}, [EMBEDDINGS, 1, 3, 5, 6], "embed_tokens lm_head"
    ),
    "a whole vocabulary": eagle3(safeailab, {}, {"draft_vocab_size": VOCABULARY}, has="lm_head"),
    "the target's head": eagle3(safeailab, {}, {"draft_vocab_size": None}, has=""),
    "the target's head, speculators": eagle3(speculators, {}, {"draft_vocab_size": VOCABULARY}, has=""),
    "a tied head": eagle3(
        safeailab, {}, {"draft_vocab_size": None, "tie_word_embeddings": True}, has="embed_tokens"
    ),
    # As those who publish EAGLE-3 for DeepSeek-V4 train it: AQ-MedAI, and SyzygyResearch, which goes on from normed
    # states.
    "EAGLE-3 for DeepSeek-V4": eagle3(safeailab, {}, {"eagle_config": {IDS: [0, 1, 3]}}, [0, 1, 3])._replace(
        target=of_v4(layer_types=[SLIDING, CSA, HCA, SLIDING, CSA])
    ),
    "EAGLE-3.1 for DeepSeek-V4": eagle3(
        safeailab, {"fc_norm": True},
        {**EAGLE3_1, "target_hidden_size": 64, "num_aux_hidden_states": 3, "eagle_config": {IDS: [0, 1, 3]}},
        [0, 1, 3], fc_norm=True, norm_output=True,
    )._replace(target=of_v4(layer_types=[SLIDING, CSA, HCA, SLIDING, CSA])),
    # P-EAGLE.
    "Amazon's P-EAGLE": eagle3(
        safeailab, {"layers": 4, "mask": (1, 192)},
        {"ptd_token_id": 5, "num_hidden_layers": 4, "draft_vocab_size": VOCABULARY,
         "rope_scaling": {"rope_type": "linear", "factor": 1.0}},
        has="embed_tokens lm_head", count=4, mask=5,
    ),
    "AutoModel's P-EAGLE": eagle3(automodel, {"layers": 2, "mask": (192,)}, {}, count=2, mask=5),
    "speculators peagle": eagle3(
        speculators, {"layers": 2, "qk_norm": False, "norm_before_fc": True, "mask": (1, 1, 192)},
        {"speculators_model_type": "peagle", "architectures": ["PEagleDraftModel"], "mask_token_id": 5,
         "embed_requires_grad": True, "norm_before_fc": True, OF_LAYER: {**LAYER, "num_hidden_layers": 2},
         "speculators_config": {"algorithm": "peagle", "proposal_methods": [{"speculative_tokens": 6}]}},
        count=2, mask=5, norm_before_fc=True,
    ),
    # transformers' own loop's.
    "Muse-Glimmer's": Layout(assistant, check_assistant, muse_glimmer),
    "Muse-Glimmer's, mixed": Layout(
        partial(assistant, layer_types=["full_attention", SLIDING], sliding_window=3), check_assistant, muse_glimmer
    ),
    "Muse-Glimmer's, all full": Layout(
        partial(assistant, layer_types=["full_attention"] * 2, rope_parameters={"rope_type": "default", "rope_theta":
        5000.0}), check_assistant, muse_glimmer,
    ),
    "specblock": Layout(
        lambda folder, _: specblock(folder, specblock_tensors(), **NAMED), check_specblock, partial(qwen3, layers=8)
    ),
    "specblock, a part": Layout(
        lambda folder, _: specblock(folder, specblock_tensors(), partial_rotary_factor=0.25),
        partial(check_specblock, rotary=4), partial(qwen3, layers=8),
    ),
}  # fmt: skip
# One of each layout.
EACH = (
    "z-lab", "speculators", "deepspec", "specforge", "z-lab dflash2", "domino", "speculators dspark", "safeailab",
    "speculators eagle3", "deepspec eagle3", "specblock", "Amazon's P-EAGLE", "speculators peagle", "Muse-Glimmer's",
)  # fmt: skip
