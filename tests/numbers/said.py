"""What the gaps of the pages' sentences hold, of results or of the models' own sizes."""

import csv
import json
import math
import re
from collections import defaultdict
from functools import cache

import torch
from safetensors import safe_open
from transformers import DeepseekV4Config

from hf_hyperdflash import DeepseekV4DSparkDrafter
from hf_hyperdflash.runtime.configuration_dspark import DeepseekV4DSparkConfig

from ..conftest import MODELS
from ..helpers.deepseek_checkpoints import dspark_fields
from ..helpers.processes import python
from .pages import PAGES, ROOT, cells
from .results import RESULTS, V4, averages, figures, rows_and_taus, served, told

HEAD, BLIND, MTP_TUNED = "State head (8)", "Blind, 52b9ed6 (6)", "MTP tuned (6)"
PAPER, WITH_HEAD = "Paper, 1500 steps (6)", "Paper + state head, 1500 steps (6)"
SEED_1 = "HyperDFlash hybrid, seed 1 (6)", "Vanilla DFlash, seed 1 (6)"
HYBRID, GATE, VANILLA = "HyperDFlash hybrid (6)", "HyperDFlash (6)", "Vanilla DFlash (6)"
BOTH = ("speedup", "tau")


def of(folder, *methods, temperature=0):
    return [value for method in methods for value in figures(folder, method, temperature, *BOTH)]


def speeds(folder, *methods, temperature=0):
    return [figures(folder, method, temperature, "speedup")[0] for method in methods]


def over_seeds(method):
    one, other = of(".", f"{method} (6)"), of("seed-1", f"{method}, seed 1 (6)")
    return [(a + b) / 2 for a, b in zip(one, other)]


def cheaper():
    """What SpecBlock takes to draft, in % of EAGLE-3: the least and the most of both targets and sizes."""
    shares = []
    for target in (V4, "tiny-qwen3"):
        all_ = averages(f"{target}/specblock/temperature-0")
        for nodes in (16, 60):
            ours, theirs = (all_[f"{name}, {nodes} nodes)", 0]["draft_ms"] for name in ("SpecBlock (8", "EAGLE-3 (7"))
            shares.append(100 * ours / theirs)
    return [min(shares), max(shares)]


def in_speed_of_eagle3(kind, run="small-blocks"):
    """SpecBlock's of one kind at both temperatures, each with its fastest shape."""
    shares = []
    for temperature in (0, 1):
        found = averages(f"{V4}/specblock/{run}/temperature-{temperature}")
        ours, theirs = (
            max(one["speedup"] for (name, _), one in found.items() if name.startswith(of)) for of in (kind, "EAGLE-3")
        )
        shares.append(ours / theirs)
    return shares


def small_blocks_draft():
    """In what part of EAGLE-3's time, by the fastest chain of each: at temperature 0, and at 1."""
    chains = ("blocks of two (6)", "EAGLE-3 (7)"), ("blocks of two (2)", "EAGLE-3 (3)")
    found = [averages(f"{V4}/specblock/small-blocks/temperature-{at}") for at in (0, 1)]
    return [
        100 * of[ours, at]["draft_ms"] / of[theirs, at]["draft_ms"]
        for at, (of, (ours, theirs)) in enumerate(zip(found, chains))
    ]


def trees_that_pay_on_the_dense_pair():
    """Speedup of trees that adapt, and of the best fixed setting, at both temperatures."""
    speeds = []
    for at in (0, 1):
        found = averages(f"tiny-qwen3/auto/trees-temperature-{at}")
        fixed = [of["speedup"] for (name, _), of in found.items() if "auto" not in name]
        speeds += [found["HyperDFlash (auto, auto nodes)", at]["speedup"], max(fixed)]
    return speeds


def without_one():
    """SpecBlock's tau on the V4, whole and without each mechanism."""
    report = (RESULTS / V4 / "specblock" / "ablation" / "report.md").read_text()
    taus = dict(re.findall(r"^\| ([^|]+) \| [\d,]+ \| (\d\.\d\d) ", report.partition("--seed 1")[0], re.MULTILINE))
    order = "SpecBlock", *(f"without {part}" for part in ("rank head", "broadcast", "valid prefix", "shift"))
    return [float(taus[name]) for name in order]


def with_another_seed():
    """SpecBlock's tau on the V4, whole and without the valid-prefix mask."""
    report = (RESULTS / V4 / "specblock" / "ablation" / "report.md").read_text().partition("--seed 1")[2]
    return [float(tau) for tau in re.findall(r"^\| [^|]+ \| [\d,]+ \| (\d\.\d\d) ", report, re.MULTILINE)]


def own_time():
    """Neither the target's nor the drafter's, in % of a round: the least and the most."""
    with (RESULTS / V4 / "summary.csv").open() as file:
        shares = [100 * float(row["overhead"]) for row in csv.DictReader(file)]
    return [min(shares), max(shares)]


def a_node(name):
    """Milliseconds of each node of a tree of 64 beyond the first 8: the least and the most of both temperatures."""
    trees = [f"State head (8, {nodes} nodes)" for nodes in (8, 64)]
    few, many = ([figures("trees", tree, at, name)[0] for at in (0, 1)] for tree in trees)
    each = [(last - first) / 56 for first, last in zip(few, many)]
    return [min(each), max(each)]


def of_trees_of_the_dense_pair(nodes):
    """Their tau, in that of the chain of six, at both temperatures."""
    found = {at: averages(f"tiny-qwen3/trees/temperature-{at}") for at in (0, 1)}
    return [
        found[at][f"state head (6, {nodes} nodes)", at]["tau"] / found[at]["chain of 6 (6)", at]["tau"]
        for at in (0, 1)
    ]


def one_look():
    """What a stream on which nothing can be gained spends on learning: seconds, their share in %, all seconds."""
    path = RESULTS / V4 / "adaptation" / "temperature-0" / "results.json"
    requests = [r for r in json.loads(path.read_text())["served"]["bandit"] if not r["part"].startswith("tuned")]
    spent, all_ = (sum(r[name] for r in requests) for name in ("cost", "seconds"))
    return [spent, len(requests), 100 * spent / all_, all_]


def calibrated():
    """That all drafts up to one are accepted, over all of them: error before and after in %, AUC after."""
    report = (RESULTS / V4 / "calibration" / "calibration.md").read_text()
    row = next(cells(line) for line in report.splitlines() if line.startswith("| all |"))
    return [float(row[6].split()[0]), float(row[7].split()[0]), float(row[9])]


TABLES = ["markov", "gated_markov", "recurrent", "selector"]


def head_shares(part, heads, candidates):
    """Of a round, in %: bytes that heads read, or time."""
    report = (RESULTS / "head-cost" / "report.md").read_text()
    (section,) = re.findall(rf"^## {part}.*?(?=^## |\Z)", report, re.MULTILINE | re.DOTALL)
    rows = [cells(line) for line in section.splitlines() if line.startswith("| ")]
    column = next(i for i, name in enumerate(rows[0]) if name in ("of its bytes", "of a round"))
    return [float(row[column].rstrip("%")) for head in heads for row in rows if row[:2] == [head, candidates]]


def of_cache():
    """What a step with the rewindable cache takes more, without recording, with it, and the stock one again, in %;
    what these hold, in KiB."""
    report = (RESULTS / V4 / "cache" / "report.md").read_text().splitlines()
    stock, again, still, recording = [cells(line) for line in report if line.startswith("| ")][1:]
    shares = [float(row[2]) for row in (still, recording, again)]
    return [*shares[:2], abs(shares[2]), *(f"{int(row[3]):,}" for row in (still, recording, stock))]


NUMBERS = {V4: ("State head ({})", (4, 6, 8)), "tiny-qwen3": ("HyperDFlash ({})", (1, 2, 3, 4, 6))}


def auto_and_best(target, temperature):
    """Speedups of "auto" and of the best number, on average over the suites."""
    name, numbers = NUMBERS[target]
    speed = averages(f"{target}/auto/temperature-{temperature}")
    auto, *fixed = (speed[name.format(n), temperature]["speedup"] for n in ("auto", *numbers))
    return auto, max(fixed)


def ahead(target, temperature):
    """By how much "auto" is faster than the best number, in %."""
    auto, best = auto_and_best(target, temperature)
    return 100 * (auto / best - 1)


def behind():
    """By how much it is slower at most, at both temperatures and on both pairs."""
    return max(-ahead(target, temperature) for target in NUMBERS for temperature in (0, 1))


def lengthened(*names):
    """Settings of the training that made the shipped drafter's blocks longer."""
    settings = json.loads((RESULTS / V4 / "auto" / "long-blocks" / "training.json").read_text())["settings"]
    return [settings[name] for name in names]


def long_blocks(temperature):
    """How much faster "auto" is with blocks of 16 than the best number, than eight drafts, and than eight of the
    shipped block, in %."""
    found = averages(f"{V4}/auto/long-blocks/temperature-{temperature}")
    speed = {name: of["speedup"] for (name, _), of in found.items() if "nodes" not in name}
    auto, shipped = speed.pop("long blocks (auto)"), speed.pop("shipped (8)")
    return [100 * (auto / other - 1) for other in (max(speed.values()), speed["long blocks (8)"], shipped)]


def long_blocks_behind():
    """Greedy, the suite on which "auto" is furthest behind the best fixed number or tree: % behind, both speeds, its
    name."""
    speeds_of = defaultdict(dict)
    with (RESULTS / V4 / "auto" / "long-blocks" / "temperature-0" / "summary.csv").open() as file:
        for row in csv.DictReader(file):
            speeds_of[row["suite"]][row["method"]] = float(row["speedup"])
    behind = []
    for suite, speeds in speeds_of.items():
        best = max(speed for name, speed in speeds.items() if name.startswith("long") and "auto" not in name)
        auto = speeds["long blocks (auto)"]
        behind.append((100 * (1 - auto / best), auto, best, SUITE_NAMES.get(suite, suite)))
    return list(max(behind))


def greedy_texts(*folders):
    """How many texts drafters wrote at temperature 0, if all of them are the target's own."""
    lines = [line for of in folders for line in (RESULTS / of / "results.jsonl").read_text().splitlines()]
    texts = [text for text in map(json.loads, lines) if text.get("temperature") == 0]
    drafted = [text for text in texts if text["method"] != "Target only"]
    assert all(text["identical"] for text in drafted)
    return len(drafted)


SUITE_NAMES = {
    "gsm8k": "GSM8K", "math500": "MATH-500", "livecodebench": "LiveCodeBench", "mbpp": "MBPP",
    "humaneval": "HumanEval",
}  # fmt: skip


def furthest_behind(temperature, target=V4):
    """The suite on which "auto" is slowest beside the best number: % behind, its name, both speeds, that number."""
    speeds_of = defaultdict(dict)
    name, numbers = NUMBERS[target]
    with (RESULTS / target / "auto" / f"temperature-{temperature}" / "summary.csv").open() as file:
        for row in csv.DictReader(file):
            speeds_of[row["suite"]][row["method"]] = float(row["speedup"])
    found = []
    for suite, of_suite in speeds_of.items():
        auto, best = of_suite[name.format("auto")], max((of_suite[name.format(n)], n) for n in numbers)
        found.append((100 * (1 - auto / best[0]), SUITE_NAMES.get(suite, suite), auto, *best))
    return list(max(found))


def faster(temperature: int) -> float:
    part = "tuned:gsm8k"
    return served(temperature)["bandit", part][1] / served(temperature)["never", part][1]


def with_more_rows():
    """How the gain of four times the rows shrinks, and where tau would end with 50,000 and 500,000 rows."""
    taus = [greedy for greedy, _ in rows_and_taus().values()]
    before, last = taus[-2] - taus[-3], taus[-1] - taus[-2]
    shrinks = round(last / before, 1)
    rest = last * shrinks / (1 - shrinks)
    return shrinks, *(taus[-1] + rest * (1 - shrinks ** math.log(rows / 6364, 4)) for rows in (50_000, 500_000))


SHIPPED = "tiny-deepseek-v4-hyperdflash"


def report(folder):
    path = RESULTS / folder
    return (path if path.suffix else path / "report.md").read_text()


def millions(model):
    """Parameters of a shipped model, in millions; MTP's are another drafter's."""
    with safe_open(MODELS / model / "model.safetensors", "pt") as file:
        shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}
    return sum(math.prod(shape) for name, shape in shapes.items() if not name.startswith("mtp.")) / 1e6


def field(name):
    return json.loads((MODELS / SHIPPED / "config.json").read_text())[name]


def trained_on():
    """Rows, which 9,000 steps of four go through three times."""
    rows = json.loads((MODELS / SHIPPED / "training.json").read_text())["settings"]["train_rows"]
    assert round(9000 * 4 / rows) == 3
    return rows


def settings(folder, *names):
    """Of a benchmark."""
    return [told(f"{folder}/report.md", rf"(?m)^- {name}: ([\d,]+)$")[0] for name in names]


def steps(folder):
    (found,) = set(re.findall(r"--max_steps ([\d,]+)", report(folder)))
    return [int(found)]


def sizes(folder, *methods):
    """Of methods that begin so: the least and the most parameters, in millions."""
    run = json.loads((RESULTS / folder / "results.jsonl").read_text().splitlines()[0])["run"]
    of = [
        float(size.replace(",", "")) / 1e6
        for name, told_of_it in run["methods"].items()
        for size in re.findall(r"([\d,]+) parameters", told_of_it)
        if name.startswith(methods)
    ]
    return [min(of), max(of)]


def of_one_size():
    """Of the drafters on both targets, in millions, if that is one number."""
    (size,) = {round(size, 2) for of in (V4, "tiny-qwen3") for size in sizes(f"{of}/specblock/temperature-0", "")}
    return [size]


def column(folder, name):
    """Of a report's tables: the least and the most, in millions."""
    rows = [cells(line) for line in report(folder).splitlines() if line.startswith("| ")]
    of = [float(row[rows[0].index(name)].replace(",", "")) / 1e6 for row in rows if row != rows[0]]
    return [min(of), max(of)]


def first_text():
    """What docs/index.md shows, which test_docs.py runs: the target's forwards, those with the drafter, tau."""
    shown = re.search(r"(\d+) tokens in (\d+) verification rounds: tau ([\d.]+)", PAGES["index"])
    tokens, rounds, tau = shown.groups()
    assert tau == f"{(int(tokens) - 1) / int(rounds):.2f}"  # the first token is the prompt's forward's
    return [int(tokens), 1 + int(rounds), tau]


def stream():
    """Requests, the first of the fine-tuned target's, and the most tokens of one."""
    found = json.loads((RESULTS / V4 / "adaptation" / "temperature-0" / "results.json").read_text())
    parts = [request["part"] for request in found["served"]["bandit"]]
    assert all(len(requests) == len(parts) for requests in found["served"].values())
    return len(parts), 1 + parts.index("tuned:gsm8k"), found["facts"]["new tokens"]


def where_nothing_is_gained():
    """What a stream loses by the looks of the bandit, in %, which were one; its requests."""
    found = json.loads((RESULTS / V4 / "adaptation" / "steady" / "results.json").read_text())["served"]
    speed = {of: sum(r["tokens"] for r in lines) / sum(r["seconds"] for r in lines) for of, lines in found.items()}
    assert sum(request["arm"] is not None for request in found["bandit"]) == 1
    return [100 * (1 - speed["bandit"] / speed["never"]), len(found["bandit"])]


def of_the_tuned(policy):
    found = json.loads((RESULTS / V4 / "adaptation" / "temperature-0" / "results.json").read_text())
    return [request for request in found["served"][policy] if request["part"] == "tuned:gsm8k"]


def recovered(share):
    """Requests until the latest 20 have so much of the tau that the target's fine-tuning took."""
    low, high = served(0)["never", "tuned:gsm8k"][0], served(0)["never", "gsm8k"][0]
    requests = of_the_tuned("bandit")
    for end in range(20, len(requests)):
        latest = requests[end - 20 : end]
        if sum(r["emitted"] for r in latest) / sum(r["rounds"] for r in latest) >= low + share * (high - low):
            return end
    raise AssertionError("never")


def updating():
    """What always updating takes, in %."""
    requests = of_the_tuned("always")
    return 100 * sum(r["cost"] for r in requests) / sum(r["seconds"] for r in requests)


def accepted_alike(temperature):
    """Of the drafts that verification came to, the share that it accepted; of no position much else."""
    of = defaultdict(lambda: [0, 0])
    for line in (RESULTS / V4 / "heads" / "results.jsonl").read_text().splitlines():
        text = json.loads(line)
        if text.get("method") == HEAD and text["temperature"] == temperature:
            for accepted in text["accepted"]:
                for position in range(min(accepted + 1, 8)):
                    of[position][0] += position < accepted
                    of[position][1] += 1
    shares = [right / all_ for right, all_ in of.values()]
    assert max(shares) - min(shares) < 0.1
    return sum(right for right, _ in of.values()) / sum(all_ for _, all_ in of.values())


def batched():
    """Texts of V4's batches that differ: with a drafter, and of how many of transformers' own how many."""
    return told(f"{V4}/batches/report.md", r"a drafter (0) differ .* of (\d+) of transformers' own batches (\d+)\.")


def counting():
    """What counting takes a round, in microseconds: of both temperatures."""
    found = json.loads((RESULTS / V4 / "survival" / "figures.json").read_text())["figures"]
    return sum(found[at]["best token's probability, counted"]["microseconds a round"] for at in "01") / 2


def dearer():
    """How many times as long ASLM takes as counting."""
    found = json.loads((RESULTS / V4 / "survival" / "figures.json").read_text())["figures"]
    names = "ASLM, 8 neighbours", "best token's probability, counted"
    times = [[found[at][name]["microseconds a round"] for name in names] for at in "01"]
    return sorted(slow / fast for slow, fast in times)


def of_gates():
    """Parameters of the gate and, in millions, of a dense projection of all residual paths, at V4-Flash's size."""
    config = DeepseekV4Config()
    paths, width = config.hc_mult, config.hidden_size
    return paths * paths * width + paths + 1, paths * width * width / 1e6


def of_dspark():
    """Gigabytes and billions of parameters of July's drafter at V4-Flash's size."""
    read = dspark_fields(noise_token_id=128799, markov_rank=256, target_layer_ids=[40, 41, 42])
    with torch.device("meta"):
        drafter = DeepseekV4DSparkDrafter(DeepseekV4DSparkConfig.of_target(DeepseekV4Config(**read)))
    count = sum(parameter.numel() for parameter in drafter.parameters())
    return 2 * count / 1e9, count / 1e9


def furthest_logits():
    """Of all programs that the unrolled drafters were held against."""
    told_apart = re.findall(r"[\d.]+e-\d+", report("unrolled"))
    assert len(told_apart) > 10
    return max(told_apart, key=float)


def same_rounds():
    """How many rounds of other programs' and ours were compared, if all of them are the same."""
    found = re.findall(r"(\d+) of (\d+)", report("layouts"))
    assert len(found) > 50 and all(same == all_ for same, all_ in found)
    return sum(int(all_) for _, all_ in found)


def longest_prompt():
    lines = (RESULTS / V4 / "heads" / "results.jsonl").read_text().splitlines()
    return max(json.loads(line).get("prompt_tokens", 0) for line in lines)


def grpo():
    """Steps of both, tokens, drafts of both."""
    asked = (
        r"(\d+) steps of one prompt each, at most (96) new tokens, temperature 1, learning rate 0\.0001.* (\d) drafts"
    )
    qwen, v4 = (told(f"{name}/grpo/report.md", asked) for name in ("tiny-qwen3", V4))
    return [qwen[0], v4[0], qwen[1], qwen[2], v4[2]]


def alone_steps(folder):
    """Milliseconds of the target's own step at both temperatures."""
    return [float(ms) for ms in re.findall(r"target-only: [\d.]+ tokens/s, ([\d.]+) ms a step", report(folder))]


@cache
def modelled_rows():
    """What examples/model_trees.py counts, by temperature."""
    ran = python(ROOT / "examples" / "model_trees.py", "--results", RESULTS / V4 / "trees")
    assert ran.returncode == 0, ran.stderr
    rows = [cells(line) for line in ran.stdout.splitlines() if re.match(r"\| (?:chain of )?\d", line)]
    return {0: {row[0]: row for row in rows[: len(rows) // 2]}, 1: {row[0]: row for row in rows[len(rows) // 2 :]}}


def modelled(temperature, nodes, place):
    return modelled_rows()[temperature][nodes][place].rstrip("×")
