"""Generate with the patch under `examples/upstream/`, which would make `bind` unnecessary: unbound DeepSeek-V4s draft
by prompt lookup, with a second V4 and with HyperDFlash, and each text is the target's own. `.ci/nightly` runs it.

    python tools/check_patch.py    # with transformers 5.24.0, which it is written against
"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PATCH = ROOT / "examples" / "upstream" / "transformers-5.24.0.patch"
sys.path.insert(0, str(ROOT))


class Overlay:
    """Finds patched copies of the installed files.

    Args:
        folder: Where the copies are made.
    """

    def __init__(self, folder: Path) -> None:
        spec = importlib.util.find_spec("transformers")
        assert spec is not None and spec.origin is not None
        self.files: dict[str, Path] = {}
        for line in PATCH.read_text().splitlines():
            if line.startswith("--- a/src/transformers/"):
                file = line.removeprefix("--- a/src/transformers/")
                copied = folder / "src/transformers" / file
                copied.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(Path(spec.origin).parent / file, copied)
                self.files["transformers." + file.removesuffix(".py").replace("/", ".")] = copied
        subprocess.run(["git", "apply", "--whitespace=nowarn", str(PATCH)], cwd=folder, check=True)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        return importlib.util.spec_from_file_location(name, self.files[name]) if name in self.files else None


def differing() -> list[str]:
    """Return what was written otherwise than by plain decoding."""
    import torch
    from transformers.generation.candidate_generator import CandidateGenerator

    from hf_hyperdflash import HyperDFlashDrafter, capture_residual
    from hf_hyperdflash.drafters.sampling import DraftRequest, DraftSampler
    from hf_hyperdflash.targets.registry import target_of
    from tests.conftest import MIXES, half_right_about, prompt, tiny_drafter, tiny_target

    torch.set_num_threads(1)

    class Candidates(CandidateGenerator):  # type: ignore[misc]
        """What a drafter would bring along."""

        requires_model_outputs, model_kwargs_overrides = True, {}

        def __init__(self, drafter: Any, target: Any, processor: Any, max_length: int) -> None:
            self.drafter, self.target, self.processor, self.max_length = drafter, target, processor, max_length
            self.context, self.capture = drafter.new_context(), capture_residual(target, drafter.target_layer_ids)
            self.residuals, self.end = self.capture.__enter__(), 0

        def get_candidates(self, input_ids: Any, *, is_first_iteration: bool, **kwargs: Any) -> Any:
            count = min(6, self.max_length - input_ids.shape[1] - 1)
            if is_first_iteration or count < 1:
                return input_ids, None
            kept, positions = input_ids.shape[1] - 1 - self.end, torch.arange(input_ids.shape[1])[None]
            new = self.residuals[-1][:, :kept], positions[:, self.end : -1], None
            self.drafter.extend(target_of(self.target), self.context, *new)
            self.end += kept
            sampler = DraftSampler(self.processor, False)
            request = DraftRequest(self.context, input_ids, positions, count, sampler)
            (tree,) = self.drafter.draft(target_of(self.target), [request])
            return torch.cat([input_ids, tree.tokens[None]], dim=1), None

        def update_candidate_strategy(self, *args: Any, **kwargs: Any) -> None:
            pass

    def get_candidate_generator(
        self: Any, main_model: Any, generation_config: Any, logits_processor: Any, model_kwargs: Any
    ) -> Candidates:
        self.used = Candidates(self, main_model, logits_processor, generation_config.max_length)
        return self.used

    HyperDFlashDrafter.get_candidate_generator = get_candidate_generator  # type: ignore[attr-defined]
    wrong = []
    for mix, kinds in enumerate(MIXES[:3]):
        target, ids = tiny_target(mix, layer_types=kinds, hidden_size=64), prompt(20, mix)
        ids, options = torch.cat([ids, ids[:, :9]], dim=1), {"do_sample": False, "max_new_tokens": 40}
        expected = target.generate(ids, **options)
        second = tiny_target(mix, layer_types=kinds, hidden_size=64)
        drafters = [second, tiny_drafter(target), half_right_about(target, expected[0])]
        for asked in ({"prompt_lookup_num_tokens": 5}, *({"assistant_model": each} for each in drafters)):
            if not torch.equal(target.generate(ids, **options, **asked), expected):
                wrong.append(f"{kinds} with {asked}")
            if isinstance(drafter := asked.get("assistant_model"), HyperDFlashDrafter):
                drafter.used.capture.__exit__(None, None, None)
    return wrong


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        sys.meta_path.insert(0, Overlay(Path(folder)))  # type: ignore[arg-type]
        if wrong := differing():
            sys.exit("\n".join(["These texts differ from plain decoding:", *wrong]))
    print("12 texts are those of plain decoding.")
