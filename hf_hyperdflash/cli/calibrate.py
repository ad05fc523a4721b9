"""`hf-hyperdflash calibrate`: fits a drafter's confidence temperatures."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, cast

from typer import Option

from . import options
from .session import Session, announce, check_writable, use_cache_if_offline, with_session


@with_session
def calibrate(
    session: Session,
    drafter: Annotated[
        Path, Option(exists=True, file_okay=False, help="Folder of a saved drafter with a confidence head.")
    ],
    data: Annotated[
        str,
        Option(
            help="Held-out conversations, a .jsonl, .json or .parquet file or a Hub name: every other one is fitted "
            "on, the rest measure."
        ),
    ],
    limit: Annotated[int | None, Option(min=2, help="Conversations; all if unset.")] = None,
    max_new_tokens: options.NewTokensOfRounds = 128,
    temperature: options.Temperature = 1.0,
    output: Annotated[
        Path | None, Option(file_okay=False, help="Folder of a report with a picture; none if unset.")
    ] = None,
    seed: options.Seed = 0,
) -> None:
    """Fit a drafter's confidence temperatures on held-out answers and write them into its config.json."""
    # Errors in prompts, or in folders to write to, are raised before models are loaded.
    for folder in (drafter, output):
        if folder is not None:
            check_writable(folder)
    announce("data", data)
    use_cache_if_offline(session.target, data)
    import torch

    from ..benchmark import calibration, report
    from ..benchmark.figures import import_matplotlib
    from ..benchmark.runner import environment
    from ..drafters.blocks.drafter import BlockDrafter
    from ..hub import loading
    from ..hub.kinds import TRAINED
    from ..training.data.encoding import encode_prompts
    from ..training.data.rows import load_rows

    kinds = [kind for kind in TRAINED if not kind.name.startswith("MTP")]  # which is its publisher's, as it is
    kind = loading.check_drafter(str(drafter), kinds=kinds).kind
    calibration.check_confidence(kind.config.from_pretrained(drafter))
    if output is not None:
        import_matplotlib()
    loading.check_target(session.target)
    rows = load_rows(data)
    count = min(len(rows), limit or len(rows))
    calibration.check_amount(count, max_new_tokens)
    tokenizer = loading.load_tokenizer(session.target, session.trust_remote_code)
    prompts = encode_prompts(tokenizer, rows.select(range(count)))
    announce("target", session.target)
    session.check([(str(drafter), None)])
    model, _, loaded = session.load([str(drafter)])
    assistant = loaded[str(drafter)]
    assistant.bind(model)
    torch.manual_seed(seed)
    options_used: dict[str, Any] = {"max_new_tokens": max_new_tokens, "temperature": temperature}
    found = calibration.calibrate(model, cast(BlockDrafter, assistant), prompts, **options_used, disable_tqdm=False)
    calibration.save_temperatures(drafter, found.temperatures)
    report.print_calibration(found)
    print(f"`confidence_temperatures` in {drafter / 'config.json'} is {found.temperatures}.")
    if output is not None:
        names = {"drafter": drafter.absolute().name, "data": Path(data).name, "prompts": len(prompts), "seed": seed}
        report.write_calibration(found, {**environment(model), **names, **options_used}, output)
        print(f"{output / 'calibration.md'}, calibration.json and reliability.png are written.")
