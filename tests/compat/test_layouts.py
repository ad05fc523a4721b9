"""Our drafts are those of the programs that wrote a layout: PyPI's `dflash` and `speculators`, DeepSpec, JetSpec and
SpecForge.

    .ci/compat                       # makes an environment with these programs and runs the comparisons
    pytest -m compat tests/compat    # where they are installed

Each layout is compared both ways: ours loads what theirs saved, theirs loads what ours wrote of that. In every round
both draft after the same text: greedily, and at temperature 1 with the same random numbers, each from its own
probabilities. The rounds of dflash and DeepSpec are those of their own loops. speculators trains and has no loop: its
rounds are the positions of a text, and what it drafts there comes from its training forward along our drafts. So are
those of SpecForge's Domino, whose own loop draws nothing, and of JetSpec, whose engine needs a GPU: there by the
module that this engine drafts with. Target and drafters are random and small.

Ours never draft the mask token, to which the others give a probability. Trained drafters give it none, so no head
scores it here.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache, LogitsProcessorList, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from hf_hyperdflash import HyperDFlashDrafter, capture_residual, load_drafter
from hf_hyperdflash.drafters import sampling
from hf_hyperdflash.drafters.sampling import DraftRequest, DraftSampler
from hf_hyperdflash.hub.formats import export_dflash
from hf_hyperdflash.targets.registry import target_of
from hf_hyperdflash.trees import growth
from hf_hyperdflash.trees.draws import sample_index

from .programs import require_checkout, require_package

WIDTH, LAYERS, BLOCK, MASK, RANK, VOCABULARY, DRAFTED = 64, 6, 5, 1, 8, 96, 40
READ = [1, 2, 4]  # the target's layers whose output the drafters read
SHAPE = dict(
    vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, max_position_embeddings=512, tie_word_embeddings=False, pad_token_id=0,
    bos_token_id=None, eos_token_id=None,
)  # fmt: skip
MIXED = dict(layer_types=["sliding_attention", "full_attention"], sliding_window=6, use_sliding_window=True)
PROMPTS, NEW_TOKENS = (8, 16), 24


@dataclass
class Round:
    """What a program drafted after a text."""

    ids: Tensor  # [1, seq], the text
    tokens: list[int]  # the drafts
    numbers: list[float]  # the random numbers that drew them; none greedily
    q: Tensor | None = None  # [drafts, vocab], what they were drawn from; `None` where the program does not say
    confidence: Tensor | None = None  # [drafts], the chance of each draft that it says; `None` where it does not


class Draws:
    """Draws in place of `torch.multinomial` and our `sample_index`, and remembers its random numbers.

    A number draws the first token at which the probabilities add up to more.
    """

    def __init__(self, numbers: list[float] | None = None) -> None:
        self.given, self.used, self.source = iter(numbers or ()), [], random.Random(0)

    def __call__(self, probabilities: Tensor, num_samples: int = 1, **_: Any) -> Tensor:
        rows = probabilities.double().reshape(-1, probabilities.shape[-1])
        numbers = [next(self.given, self.source.random()) for _ in rows]
        self.used += numbers
        tokens = (rows.cumsum(-1) <= torch.tensor(numbers)[:, None].double()).sum(-1).clamp(max=rows.shape[1] - 1)
        return tokens.reshape(*probabilities.shape[:-1], 1)


def randomize(model: nn.Module, seed: int) -> Any:
    """Draw all weights anew, none of them as a fresh model has it; what is shared with the target stays."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "embed_tokens" not in name and "lm_head" not in name and "verifier" not in name:
            noise = torch.randn(parameter.shape, generator=generator)
            is_norm = parameter.ndim == 1 and "bias" not in name
            parameter.data.copy_(1 + 0.3 * noise if is_norm else noise / parameter.shape[-1] ** 0.5)
    return model.eval()


def without_mask_token(model: nn.Module) -> Any:
    """Let no LM head over the whole vocabulary score the mask token."""

    def hide(head: nn.Module, args: tuple, logits: Tensor) -> Tensor:
        return logits.index_fill(-1, torch.tensor([MASK]), -1e4)

    for name, module in model.named_modules():
        if name.endswith("lm_head") and module.weight.shape[0] == VOCABULARY:
            module.register_forward_hook(hide)
    return model


@pytest.fixture
def target(tmp_path: Path) -> PreTrainedModel:
    """A random target, saved at its `_name_or_path`: speculators reads its LM head from there."""
    torch.manual_seed(0)
    config = Qwen3Config(**{**SHAPE, "num_hidden_layers": LAYERS}, initializer_range=0.2)
    target = Qwen3ForCausalLM(config).eval()
    target.save_pretrained(tmp_path / "target")
    target.config._name_or_path = str(tmp_path / "target")
    return without_mask_token(target)


@torch.no_grad()
def our_round(drafter: Any, target: PreTrainedModel, ids: Tensor, count: int, draws: Draws | None) -> Round:
    """Draft with ours after a text, from the start; greedily without `draws`."""
    with capture_residual(target, drafter.target_layer_ids) as captured:
        target(ids[:, :-1])
    context, positions = drafter.new_context(), torch.arange(ids.shape[1])[None]
    drafter.extend(target_of(target), context, captured[0], positions[:, :-1], ids[:, 1:])
    sampler = DraftSampler(LogitsProcessorList(), draws is not None)
    draw = draws or sample_index
    with patch.object(sampling, "sample_index", draw), patch.object(growth, "sample_index", draw):
        (tree,) = drafter.draft(target_of(target), [DraftRequest(context, ids, positions, count, sampler)])
    q = None if draws is None else torch.stack(tree.q)
    return Round(ids, tree.tokens.tolist(), draws.used if draws else [], q, tree.confidence)


# PyPI's dflash


def dflash_config(windows: dict[str, Any]) -> Qwen3Config:
    own = {"mask_token_id": MASK, "target_layer_ids": READ, "block_size": BLOCK, "conv_kernel_size": 2}
    own |= {"conv_group_size": 16, "selector_rank": RANK, "selector_top_k": 16}
    return Qwen3Config(**SHAPE, num_target_layers=LAYERS, dflash_config=own, **windows)


def save_with_dflash(windows: dict[str, Any], folder: Path, target: PreTrainedModel) -> None:
    from dflash.model import DFlash2DraftModel

    randomize(DFlash2DraftModel(dflash_config(windows)), 1).save_pretrained(folder)


def rounds_of_dflash(folder: Path, target: PreTrainedModel, prompt: Tensor, T: float) -> list[Round]:
    from dflash.model import DFlash2DraftModel, dflash_generate

    model, draws, seen = DFlash2DraftModel.from_pretrained(folder, dtype=torch.float32).eval(), Draws(), []
    propose, topk = model.propose, torch.topk

    def in_order(values: Tensor, count: int, **_: Any) -> tuple[Tensor, Tensor]:
        """Candidates by their ids, an order that `sorted=False` leaves open: draws then mean the same tokens."""
        ids = topk(values, count, dim=-1).indices.sort(dim=-1).values
        return values.gather(-1, ids), ids

    def recording(*args: Any) -> Any:
        before = len(draws.used)
        with patch("torch.topk", in_order):
            drafted, candidates, probabilities = propose(*args)
        q = None
        if probabilities is not None:
            q = torch.zeros(*probabilities.shape[1:2], VOCABULARY).scatter(-1, candidates[0], probabilities[0])
        seen.append(Round(torch.empty(0), drafted[0].tolist(), draws.used[before:], q))
        return drafted, candidates, probabilities

    starts = []

    def verifying(module: nn.Module, args: tuple, kwargs: dict) -> None:
        starts.append(int(kwargs["position_ids"][0, 0]))

    handle = target.register_forward_pre_hook(verifying, with_kwargs=True)
    model.propose = recording
    with patch("torch.multinomial", draws):
        text = dflash_generate(model, target, prompt, NEW_TOKENS, stop_token_ids=None, temperature=T)
    handle.remove()
    for start, one in zip(starts[1:], seen):
        one.ids = text[:, : start + 1]
    return [one for one in seen if len(one.tokens) == BLOCK - 1]  # at a text's end it cuts the block


# speculators


def speculators_model(algorithm: str, target_folder: str, windows: dict[str, Any], **fields: Any) -> Any:
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.models.dflash2 import DFlash2DraftModel, DFlash2SpeculatorConfig
    from speculators.models.dspark import DSparkDraftModel, DSparkSpeculatorConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig

    classes = {
        "dspark": (DSparkDraftModel, DSparkSpeculatorConfig),
        "dflash2": (DFlash2DraftModel, DFlash2SpeculatorConfig),
    }
    model_class, config_class = classes[algorithm]
    layers = Qwen3Config(**SHAPE, **windows)
    layers._attn_implementation = "eager"
    config = config_class(
        transformer_layer_config=layers, block_size=BLOCK, mask_token_id=MASK,
        aux_hidden_state_layer_ids=[i + 1 for i in READ],
        **{"draft_vocab_size": VOCABULARY, **fields},
        speculators_config=SpeculatorsConfig(
            algorithm=algorithm, proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=BLOCK - 1)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=target_folder, architectures=["Qwen3ForCausalLM"]),
        ),
    )  # fmt: skip
    return model_class(config)


def save_with_speculators(
    algorithm: str, windows: dict[str, Any], fields: dict[str, Any], folder: Path, target: PreTrainedModel
) -> None:
    model = speculators_model(algorithm, target.config._name_or_path, windows, **fields)
    if model.use_draft_vocab:
        generator = torch.Generator().manual_seed(0)
        kept = 2 + torch.randperm(VOCABULARY - 2, generator=generator)[:DRAFTED].sort().values
        mask = torch.zeros(VOCABULARY, dtype=torch.bool).index_fill_(0, kept, True)
        model.load_vocab_mappings(mask, kept - torch.arange(DRAFTED))
    model.load_verifier_weights()
    randomize(model, 2).save_pretrained(folder)


def rounds_of_speculators(folder: Path, target: PreTrainedModel, prompt: Tensor, T: float) -> list[Round]:
    from speculators import SpeculatorModel, SpeculatorModelConfig

    config = SpeculatorModelConfig.from_pretrained(folder)
    config.transformer_layer_config._attn_implementation = "eager"
    model = SpeculatorModel.from_pretrained(folder, config=config, dtype=torch.float32).eval()
    without_mask_token(model)
    drafter = load_drafter(folder, target=target)
    text = target.generate(prompt, max_new_tokens=NEW_TOKENS, do_sample=False)
    seen = []
    for end in range(prompt.shape[1], text.shape[1]):
        ours = our_round(drafter, target, text[:, :end], drafter.max_draft_tokens, Draws() if T else None)
        seen.append(along_our_drafts(model, target, ours))
    return seen


@torch.no_grad()
def along_our_drafts(model: Any, target: PreTrainedModel, ours: Round) -> Round:
    """Run its training forward with our drafts as the text after the anchor: what it drafts at each position, given
    the drafts before."""
    ids, anchor = torch.cat([ours.ids, torch.tensor([[*ours.tokens, 0]])], dim=1), ours.ids.shape[1] - 1
    states = target(ids, output_hidden_states=True).hidden_states
    features = torch.cat([states[i] for i in model.target_layer_ids], dim=-1)
    whole = torch.ones_like(ids)
    chosen = (torch.tensor([anchor]), torch.tensor([True]))
    with patch("speculators.models.dflash.core.select_anchors", lambda *_: chosen):
        hidden, logits, *_, at = model._backbone_forward(
            features, ids, whole, states[-1], torch.zeros_like(ids), max_anchors=1
        )
    block, hidden, logits = ids[:, at], hidden.view(1, BLOCK, -1), logits.view(1, BLOCK, -1)
    first = 0 if model.config.sample_from_anchor else 1
    before = block if first == 0 else torch.cat([block[:, :1], block[:, :-1]], dim=1)
    confidence = None
    if hasattr(model, "candidate_selector"):
        candidates, scores = model.candidate_selector.select(logits, hidden, before)
        logits = torch.full_like(logits, -torch.inf).scatter(-1, candidates, scores)
    elif model.markov_head is not None:
        logits = logits + model.markov_head.block_bias(prev_token_ids=before, hidden_states=hidden)
    if getattr(model, "confidence_head", None) is not None:
        read = [hidden]
        if model.config.confidence_head_with_markov:
            read.append(model.markov_head.prev_embeddings(before))
        confidence = torch.sigmoid(model.confidence_head(torch.cat(read, dim=-1)))[0, first:]
    logits = logits[0, first:]
    if model.use_draft_vocab:
        kept = model.d2t + torch.arange(len(model.d2t))
        logits = torch.full((len(logits), VOCABULARY), -torch.inf).index_copy(-1, kept, logits)
    q, draws = logits.softmax(-1), Draws(ours.numbers)
    tokens = [int(draws(one)) for one in q] if ours.numbers else logits.argmax(-1).tolist()
    return Round(ours.ids, tokens, ours.numbers, q if ours.numbers else None, confidence)


# DeepSpec


def save_with_deepspec(head: str | None, reads: bool, folder: Path, target: PreTrainedModel) -> None:
    from deepspec.modeling.dspark import Qwen3DSparkModel

    fields = dict(num_target_layers=LAYERS, block_size=BLOCK, mask_token_id=MASK, target_layer_ids=READ)
    fields |= dict(num_anchors=4, enable_confidence_head=True, confidence_head_with_markov=reads)
    fields |= dict(markov_rank=RANK if head else 0, markov_head_type=head or "vanilla")
    config = Qwen3Config(**SHAPE, **fields, layer_types=["full_attention"] * SHAPE["num_hidden_layers"])
    model = Qwen3DSparkModel(config)
    model.initialize_embeddings_and_head(
        embed_tokens=target.get_input_embeddings(), lm_head=target.get_output_embeddings()
    )
    randomize(model, 3).save_pretrained(folder)


def rounds_of_deepspec(folder: Path, target: PreTrainedModel, prompt: Tensor, T: float) -> list[Round]:
    from deepspec.eval.dspark.evaluator import Qwen3DSparkEvaluator
    from deepspec.modeling.dspark import Qwen3DSparkModel

    evaluator, draws, seen = object.__new__(Qwen3DSparkEvaluator), Draws(), []
    evaluator.target_model, evaluator.confidence_head_recorder = target, None
    model = Qwen3DSparkModel.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").eval()
    evaluator.draft_model = without_mask_token(model)
    evaluator.args = SimpleNamespace(max_new_tokens=NEW_TOKENS, temperature=T, confidence_threshold=0.0)
    propose = evaluator._propose

    def recording(*, context: Any, output_ids: Tensor, position_ids: Tensor, start: int, **rest: Any) -> Any:
        before = len(draws.used)
        drafted = propose(context=context, output_ids=output_ids, position_ids=position_ids, start=start, **rest)
        one = Round(output_ids[:, : start + 1].clone(), drafted.verify_input_ids[0, 1:].tolist(), draws.used[before:])
        one.q = drafted.draft_probs[0] if T else None
        one.confidence = None if drafted.confidence_logits is None else torch.sigmoid(drafted.confidence_logits[0])
        seen.append(one)
        return drafted

    evaluator._propose = recording
    with patch("torch.multinomial", draws), cropped_to_a_length():
        evaluator.generate_one_sample(input_ids=prompt, stop_token_ids=None)
    return seen


def cropped_to_a_length() -> Any:
    """As transformers 5.10, which others are written for: from 5.18 on a number of tokens to remove is meant."""
    crop = DynamicCache.crop

    def to_length(cache: DynamicCache, length: int) -> None:
        crop(cache, length if length <= 0 else min(length - cache.get_seq_length(), 0))

    return patch.object(DynamicCache, "crop", to_length)


# JetSpec, and SpecForge's Domino


def save_jetspec(windows: dict[str, Any], folder: Path, target: PreTrainedModel) -> None:
    from jetspec.models.draft_head import DFlashDraftModel

    own = {"mask_token_id": MASK, "target_layer_ids": READ, "causal_head": True}
    config = Qwen3Config(**SHAPE, num_target_layers=LAYERS, block_size=BLOCK, dflash_config=own, **windows)
    randomize(DFlashDraftModel(config), 5).save_pretrained(folder)


def rounds_of_jetspec(folder: Path, target: PreTrainedModel, prompt: Tensor, T: float) -> list[Round]:
    from jetspec.draft_head_adapter import DraftHeadTreeDrafter
    from jetspec.models.draft_head import load_draft_head

    head = load_draft_head(str(folder), device="cpu", dtype=torch.float32)
    drafter, seen = DraftHeadTreeDrafter(head, target, BLOCK, READ), []
    for ids, features in texts_of(target, prompt):
        with torch.no_grad(), cropped_to_a_length():
            logits = drafter.propose_logits(ids, BLOCK - 1, target_hidden=features)[0]
        seen.append(drawn(ids, logits.softmax(-1), Draws() if T else None))
    return seen


def save_domino(is_shifted: bool, folder: Path, target: PreTrainedModel) -> None:
    from specforge.modeling.draft.domino import DominoDraftModel

    own = {"mask_token_id": MASK, "target_layer_ids": READ, "projector_type": "domino", "shift_label": is_shifted}
    own |= {"emb_dim": RANK, "gru_hidden_dim": 12}
    config = Qwen3Config(**SHAPE, num_target_layers=LAYERS, block_size=BLOCK, dflash_config=own)
    randomize(DominoDraftModel(config), 6).save_pretrained(folder)


def rounds_of_domino(folder: Path, target: PreTrainedModel, prompt: Tensor, T: float) -> list[Round]:
    from specforge.modeling.draft.domino import DominoDraftModel

    model = DominoDraftModel.from_pretrained(folder, dtype=torch.float32).eval()
    ours, seen = load_drafter(folder, target=target), []
    for ids, features in texts_of(target, prompt):
        block = torch.full((1, BLOCK), MASK).index_fill(1, torch.tensor([0]), int(ids[0, -1]))
        with torch.no_grad():
            hidden = model(
                position_ids=torch.arange(ids.shape[1] - 1 + BLOCK)[None], target_hidden=features, is_causal=False,
                noise_embedding=target.model.embed_tokens(block),
            )  # fmt: skip
            if not T:
                tokens = model._sample_draft_tokens(target, hidden, block)[0]
                seen.append(Round(ids, tokens.tolist(), []))
                continue
            one = our_round(ours, target, ids, BLOCK - 1, Draws())
            block[0, 1:] = torch.tensor(one.tokens)
            logits = model.apply_logits_head(
                target.lm_head(hidden)[:, None], prev_token_embeddings=target.model.embed_tokens(block)[:, None],
                hidden_states=hidden[:, None],
            )[0, 0]  # fmt: skip
        q = logits[:-1] if model.shift_label else logits[1:]
        seen.append(drawn(ids, q.softmax(-1), Draws(one.numbers)))
    return seen


def texts_of(target: PreTrainedModel, prompt: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield a text at each of its lengths from the prompt's on, and what drafters read of all but its last token."""
    text = target.generate(prompt, max_new_tokens=NEW_TOKENS, do_sample=False)
    with torch.no_grad():
        states = target(text, output_hidden_states=True).hidden_states
    features = torch.cat([states[i + 1] for i in READ], dim=-1)
    for end in range(prompt.shape[1], text.shape[1]):
        yield text[:, :end], features[:, : end - 1]


def drawn(ids: Tensor, q: Tensor, draws: Draws | None) -> Round:
    """A round whose drafts are drawn one by one from `q`, `[drafts, vocab]`, or are the best."""
    if draws is None:
        return Round(ids, q.argmax(-1).tolist(), [])
    return Round(ids, [int(draws(one)) for one in q], draws.used, q)


# The comparison


CHECKOUTS = ("deepspec", "jetspec", "specforge")  # the others are packages


class Case(NamedTuple):
    """A program, what it calls its drafter, the layout as `export_dflash` calls it, what saves a random one with the
    program, and its drafts after a prompt at a temperature."""

    program: str
    kind: str
    format: str
    save: Callable[[Path, PreTrainedModel], None]
    rounds: Callable[[Path, PreTrainedModel, Tensor, float], list[Round]]


def cases() -> Iterator[Case]:
    for name, windows in (
        ("", {"is_causal": False}), (", sliding", {**MIXED, "is_causal": False}), (", sliding and causal", MIXED),
        (", causal", {"is_causal": True}),
    ):  # fmt: skip
        yield Case("dflash", f"DFlash 2{name}", "z-lab", partial(save_with_dflash, windows), rounds_of_dflash)
    of_selector = {"selector_rank": RANK}
    for name, algorithm, windows, fields in (
        ("DFlash 2", "dflash2", {}, of_selector),
        ("DFlash 2, sliding", "dflash2", MIXED, of_selector),
        ("DFlash 2, sliding and causal", "dflash2", MIXED, {**of_selector, "sliding_window_non_causal": False}),
        ("DSpark vanilla, truncated", "dspark", {}, dspark("vanilla", draft_vocab_size=DRAFTED)),
        ("DSpark gated, a + k", "dspark", {}, dspark("gated", sample_from_anchor=False)),
        ("DSpark rnn, truncated", "dspark", {}, dspark("rnn", draft_vocab_size=DRAFTED)),
    ):
        save = partial(save_with_speculators, algorithm, windows, fields)
        yield Case("speculators", name, "speculators", save, rounds_of_speculators)
    for kind, reads in (("vanilla", True), ("gated", False), ("rnn", True), (None, False)):
        save = partial(save_with_deepspec, kind, reads)
        yield Case("deepspec", f"DSpark {kind or 'headless'}", "deepspec", save, rounds_of_deepspec)
    yield Case("jetspec", "JetSpec", "z-lab", partial(save_jetspec, {}), rounds_of_jetspec)
    for is_shifted in (False, True):
        kind = f"Domino{', shifted' * is_shifted}"
        yield Case("specforge", kind, "z-lab", partial(save_domino, is_shifted), rounds_of_domino)


def dspark(kind: str, **fields: Any) -> dict[str, Any]:
    return {"markov_head_type": kind, "markov_rank": RANK, "sample_from_anchor": True, **fields}


@pytest.mark.compat
@pytest.mark.filterwarnings("ignore::FutureWarning")  # what other programs call by its old name
@pytest.mark.parametrize("written_by", ["theirs", "ours"])
@pytest.mark.parametrize("case", cases(), ids=lambda case: f"{case.program}-{case.kind}")
def test_both_draft_the_same(case, written_by, target, tmp_path, monkeypatch):
    if case.program in CHECKOUTS:
        monkeypatch.syspath_prepend(require_checkout(case.program.upper()))
    else:
        require_package(case.program)
    folder = tmp_path / "theirs"
    case.save(folder, target)
    drafter = load_drafter(folder, target=target)
    if written_by == "ours":
        folder = tmp_path / "ours"
        export_dflash(drafter, folder, case.format, target)
        drafter = load_drafter(folder, target=target)
    for temperature in (0.0, 1.0):
        for length in PROMPTS:
            theirs = case.rounds(folder, target, torch.randint(2, VOCABULARY, (1, length)), temperature)
            assert len(theirs) > 2
            for their in theirs:
                draws = Draws(their.numbers) if temperature else None
                ours = our_round(drafter, target, their.ids, len(their.tokens), draws)
                assert ours.tokens == their.tokens
                torch.testing.assert_close(ours.q, their.q, atol=5e-5, rtol=0)
                torch.testing.assert_close(ours.confidence, their.confidence, atol=5e-6, rtol=0)


def test_our_rounds_draw_with_the_numbers_that_are_given(target):
    """What the comparisons rest on, without another program: each draft by its own number, from its own `q`."""
    fields = dict(sequential_head="markov", head_rank=RANK, reducer="fc", target_layer_ids=READ, mask_token_id=MASK)
    drafter = randomize(HyperDFlashDrafter.from_target(target, num_draft_tokens=BLOCK - 1, **fields), 4)
    ids, numbers = torch.randint(2, VOCABULARY, (1, 8)), [0.9, 0.1, 0.5, 0.7]
    drawn = our_round(drafter, target, ids, BLOCK - 1, Draws(numbers))
    expected = []
    for number, q in zip(numbers, drawn.q.tolist()):
        total, token = q[0], 0
        while total <= number:
            token += 1
            total += q[token]
        expected.append(token)
    greedy = our_round(drafter, target, ids, BLOCK - 1, None)
    assert drawn.tokens == expected != greedy.tokens and drawn.numbers == numbers
    assert drawn.q[:, MASK].eq(0).all() and greedy.q is None
