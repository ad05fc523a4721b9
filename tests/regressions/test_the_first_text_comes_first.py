"""`generate --compare` let its user wait for the drafter to warm up before the target's own text was shown."""

from transformers import GenerationMixin
from typer.testing import CliRunner

from hf_hyperdflash.cli.app import app


def test_nothing_is_drafted_before_the_targets_own_text(dense_pair, monkeypatch):
    target, drafter = dense_pair
    stock, calls = GenerationMixin.generate, []

    def generate(self, *args, **options):
        calls.append((options.get("assistant_model") is not None, options.get("streamer") is not None))
        return stock(self, *args, **options)

    monkeypatch.setattr(GenerationMixin, "generate", generate)
    arguments = ["generate", "--compare", "--target", target, "--drafter", drafter, "--max-new-tokens", 4, "Hello"]
    result = CliRunner().invoke(app, list(map(str, arguments)))
    assert result.exit_code == 0, (result.output, result.exception)
    shown = [is_drafted for is_drafted, is_shown in calls if is_shown]
    assert shown == [False, True]
    before = calls[: calls.index((False, True))]
    assert before and not any(is_drafted for is_drafted, _ in before)
    assert (True, False) in calls[: calls.index((True, True))], "the drafter is warmed up, too"
