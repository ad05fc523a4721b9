"""Compare the augmented space linear model (ASLM) with ridge regression and with Gaussian kernel ridge regression.

Its abstract says that it approaches nonlinear models at the cost of linear ones. Three nonlinear problems with noise:
a Mackey-Glass series and the first coordinate of the Lorenz system, predicted from 7 values, and a static function of
5 inputs. Errors are those against the clean target, in shares of its variance, so that noise has no floor of its own;
inputs and training targets are noisy. Kernel ridge regression chooses width and penalty on the last fifth of the
training rows, and so does the last ASLM its number of neighbours; the others are set beforehand.

    OMP_NUM_THREADS=1 python experiments/compare_aslm.py --output experiments/results/aslm
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from hf_hyperdflash.auto.aslm import AugmentedSpaceLinearModel

MOST = 256  # centres of a bounded store
NOISE = (0.0, 0.02, 0.1, 0.3)  # standard deviation, in shares of the clean signal's
LINEAR, KERNEL, CHOSEN, BOUNDED = "ridge", "kernel ridge", "ASLM k chosen", "ASLM k=8, bounded"
BETWEEN = ("ASLM k=1", "ASLM k=8", BOUNDED, CHOSEN)
SIDE_BY_SIDE = ("ASLM k=1", KERNEL)
COLOURS = ("#000000", "#0072B2", "#56B4E9", "#009E73", "#CC79A7", "#D55E00")  # Okabe and Ito
Rows = tuple[np.ndarray, np.ndarray]


class Ridge:
    """ASLM's linear part, alone."""

    def fit(self, X: np.ndarray, y: np.ndarray) -> Ridge:
        X = np.column_stack([X, np.ones(len(X))])
        self.weights = np.linalg.solve(0.1 * np.eye(X.shape[1]) + X.T @ X, X.T @ y)
        return self

    def predict(self, X: np.ndarray) -> np.ndarray:
        return X @ self.weights[:-1] + self.weights[-1]


class ASLM(AugmentedSpaceLinearModel):
    """ASLM that forgets what it learned when it is fitted again, as the other methods do."""

    def fit(self, X: np.ndarray, y: np.ndarray) -> ASLM:
        self.weights = None
        self.partial_fit(X, y)
        return self


class KernelRidge:
    """`y = k(x, X) (K + penalty I)^-1 d` with k(a, b) = exp(-|a - b|^2 / (2 width^2)), about the targets' mean."""

    def __init__(self, width: float, penalty: float) -> None:
        self.width, self.penalty = width, penalty

    def kernel(self, X: np.ndarray) -> np.ndarray:
        squares = (X * X).sum(1)[:, None] + self.squares - 2 * X @ self.X.T
        return np.exp(squares / (-2 * self.width**2))

    def fit(self, X: np.ndarray, y: np.ndarray) -> KernelRidge:
        self.X, self.squares, self.mean = X, (X * X).sum(1), y.mean()
        self.weights = np.linalg.solve(self.kernel(X) + self.penalty * np.eye(len(X)), y - self.mean)
        return self

    def predict(self, X: np.ndarray) -> np.ndarray:
        return self.kernel(X) @ self.weights + self.mean


def chosen(candidates: Iterable[Any], X: np.ndarray, y: np.ndarray) -> Any:
    """The candidate that errs least on the last fifth of the rows, after the others."""
    held = len(X) // 5
    fitted = [candidate.fit(X[:-held], y[:-held]) for candidate in candidates]
    return min(fitted, key=lambda model: np.mean((model.predict(X[-held:]) - y[-held:]) ** 2))


def kernel_candidates(X: np.ndarray) -> Iterator[KernelRidge]:
    """Widths about the median distance of inputs."""
    some = X[:200]
    distances = np.sqrt(((some[:, None] - some) ** 2).sum(-1))
    median = np.median(distances[distances > 0])
    for share in (0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0):
        for penalty in (1e-8, 1e-6, 1e-4, 1e-2, 0.1, 1.0, 10.0):
            yield KernelRidge(share * median, penalty)


METHODS: dict[str, Callable[[np.ndarray, np.ndarray], Any]] = {
    LINEAR: lambda X, y: Ridge(),
    "ASLM k=1": lambda X, y: ASLM(),
    "ASLM k=8": lambda X, y: ASLM(n_neighbors=8),
    BOUNDED: lambda X, y: ASLM(n_neighbors=8, quantization=0.1, max_centers=MOST),
    CHOSEN: lambda X, y: chosen([ASLM(n_neighbors=2**i) for i in range(7)], X, y),
    KERNEL: lambda X, y: chosen(kernel_candidates(X), X, y),
}


def mackey_glass(length: int, generator: np.random.Generator) -> np.ndarray:
    """x' = 0.2 x(t - 30) / (1 + x(t - 30)^10) - 0.1 x, in Euler's steps of 0.1, one value per unit of time."""
    delay, steps = 300, 10
    series = np.empty(delay + steps * (length + 500))
    series[:delay] = 1.2 + 0.2 * generator.standard_normal()
    for i in range(delay, len(series)):
        past = series[i - delay]
        series[i] = series[i - 1] + 0.1 * (0.2 * past / (1 + past**10) - 0.1 * series[i - 1])
    return series[::-steps][:length][::-1]


def lorenz(length: int, generator: np.random.Generator) -> np.ndarray:
    """The first coordinate, sigma 10, rho 28, beta 8/3, in Runge and Kutta's steps of 0.025, every second value."""

    def change(state: np.ndarray) -> np.ndarray:
        x, y, z = state
        return np.array([10 * (y - x), x * (28 - z) - y, x * y - 8 / 3 * z])

    state, h, series = generator.standard_normal(3) + [0, 0, 25], 0.025, []
    for _ in range(2 * length + 500):
        a = change(state)
        b = change(state + h / 2 * a)
        c = change(state + h / 2 * b)
        d = change(state + h * c)
        state = state + h / 6 * (a + 2 * b + 2 * c + d)
        series.append(state[0])
    return np.array(series[500::2])


def of_series(
    series: np.ndarray, apart: int, horizon: int, noise: float, generator: np.random.Generator
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Inputs, 7 noisy values `apart` from each other, and `horizon` steps after the last of them the target, noisy and
    clean."""
    clean = (series - series.mean()) / series.std()
    noisy = clean + noise * generator.standard_normal(len(clean))
    first = np.arange(len(clean) - 6 * apart - horizon)
    last = first + 6 * apart + horizon
    return noisy[first[:, None] + apart * np.arange(7)], noisy[last], clean[last]


def of_function(rows: int, noise: float, generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Friedman's function of 5 uniform inputs (1991), the target alone noisy."""
    X = generator.random((rows, 5))
    y = 10 * np.sin(np.pi * X[:, 0] * X[:, 1]) + 20 * (X[:, 2] - 0.5) ** 2 + 10 * X[:, 3] + 5 * X[:, 4]
    clean = (y - y.mean()) / y.std()
    return X, clean + noise * generator.standard_normal(rows), clean


def problems(train: int, seed: int) -> Iterator[tuple[str, float, Rows, Rows]]:
    """Of each problem and noise: its name, the noise, `train` rows to learn from and as many to be judged by."""
    room = 2 * train + 200
    series = {
        "Mackey-Glass": (mackey_glass(room, np.random.default_rng(seed)), 5, (1, 6, 20)),
        "Lorenz": (lorenz(room, np.random.default_rng(seed)), 1, (2, 8)),
    }
    for noise in NOISE:
        generator = np.random.default_rng([seed, round(1000 * noise)])
        made = {
            f"{name}, {horizon} ahead": of_series(values, apart, horizon, noise, generator)
            for name, (values, apart, horizons) in series.items()
            for horizon in horizons
        }
        made["Friedman's function"] = of_function(room, noise, generator)
        for name, (X, y, clean) in made.items():
            yield name, noise, (X[:train], y[:train]), (X[-train:], clean[-train:])


def measured(method: str, learned: Rows, judged: Rows) -> dict[str, Any]:
    """Error and CPU seconds of one method: choosing its settings, learning all rows, predicting, and one row alone."""
    clock = [time.process_time()]
    model = METHODS[method](*learned)
    clock.append(time.process_time())
    model.fit(*learned)
    clock.append(time.process_time())
    error = float(np.mean((model.predict(judged[0]) - judged[1]) ** 2) / np.var(judged[1]))
    clock.append(time.process_time())
    singles = min(50, len(judged[0]))
    for i in range(singles):
        model.predict(judged[0][i : i + 1])
    clock.append(time.process_time())
    choosing, fitting, predicting, single = np.diff(clock).tolist()
    settings = {"width": model.width, "penalty": model.penalty} if method == KERNEL else {}
    if isinstance(model, ASLM):
        settings = {"neighbours": model.n_neighbors, "centres": len(model.errors)}
    seconds = {"choosing": choosing, "fitting": fitting, "predicting": predicting, "single": single / singles}
    return {"method": method, "error": error, **seconds, **settings}


def hardware() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    cpu = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
    threads = os.environ.get("OMP_NUM_THREADS", "not set")
    return f"{datetime.date.today()}, {platform.platform()}, {cpu} (OMP_NUM_THREADS {threads}), numpy {np.__version__}"


def means(results: list[dict]) -> dict[tuple[str, float], dict[str, tuple[float, float]]]:
    """By problem and noise, by method: mean and standard deviation of the errors over seeds."""
    found: dict[tuple[str, float], dict[str, list[float]]] = {}
    for row in results:
        found.setdefault((row["problem"], row["noise"]), {}).setdefault(row["method"], []).append(row["error"])
    return {
        at: {method: (float(np.mean(errors)), float(np.std(errors))) for method, errors in by.items()}
        for at, by in found.items()
    }


def verdict(table: dict[tuple[str, float], dict[str, tuple[float, float]]]) -> Iterator[str]:
    """Where the claim holds: by mean error, above kernel ridge and below ridge."""
    for method in BETWEEN:
        worse, better = [], []
        for (problem, noise), by in table.items():
            place = f"{problem} with noise {noise:g}"
            if by[method][0] >= by[LINEAR][0]:
                worse.append(place)
            if by[method][0] < by[KERNEL][0]:
                better.append(place)
        gained = [
            (by[LINEAR][0] - by[method][0]) / (by[LINEAR][0] - by[KERNEL][0])
            for by in table.values()
            if by[KERNEL][0] < by[LINEAR][0]
        ]
        times = np.median([by[method][0] / by[KERNEL][0] for by in table.values()])
        between = len(table) - len(set(worse + better))
        text = (
            f"- **{method}**: between them in {between} of {len(table)} conditions, with {times:.2g} times the error"
        )
        text += " of kernel ridge (median)"
        if gained:
            text += f"; of what kernel ridge gains over ridge it gains {np.median(gained):.0%} (median)"
        yield text + "".join(
            f". {said} ({len(places)}): {'; '.join(places)}"
            for said, places in (("No better than ridge", worse), ("Better than kernel ridge", better))
            if places
        )


def report(results: list[dict], seeds: int, train: int) -> str:
    table = means(results)
    bounded = [row["centres"] for row in results if row["method"] == BOUNDED]
    lines = [
        "# Augmented space linear model beside ridge and kernel ridge",
        "",
        f"Written by `experiments/compare_aslm.py`. {hardware()}.",
        f"{train} rows to learn from, {train} to be judged by; {seeds} seeds. Squared error against the clean target",
        "in shares of its variance, mean ± standard deviation over seeds; 1 is what the mean would have. Noise is in",
        "shares of the signal's standard deviation, on inputs and training targets (Friedman's function: on targets",
        "alone). The penalty is 0.1 for ridge and ASLM. Kernel ridge chose width and penalty, and `ASLM k chosen` its",
        f"neighbours, on the last fifth of the training rows. Bounded: quantized with epsilon 0.1 to {MOST} centres",
        f"at most, which {sum(centres == MOST for centres in bounded)} of {len(bounded)} runs filled.",
        "",
        f"| problem | noise | {' | '.join(METHODS)} |",
        f"|:---|---:|{'---:|' * len(METHODS)}",
    ]
    for (problem, noise), by in table.items():
        cells = [f"{mean:.2g} ± {deviation:.1g}" for mean, deviation in (by[method] for method in METHODS)]
        lines.append(f"| {problem} | {noise:g} | {' | '.join(cells)} |")
    lines += ["", "## The claim: between the linear and the nonlinear model", "", *verdict(table), "", "## Time", ""]
    lines += [
        "CPU seconds, medians over all of the above; the methods took turns on the same rows. Choosing comes before",
        "fitting, where a method chooses. Centres are the mean number.",
        "",
        f"| method | choosing, ms | fitting, ms | predicting {train} rows, ms | predicting one row, µs | centres |",
        "|:---|---:|---:|---:|---:|---:|",
    ]
    for method in METHODS:
        rows = [row for row in results if row["method"] == method]
        taken = {
            name: np.median([row[name] for row in rows]) for name in ("choosing", "fitting", "predicting", "single")
        }
        choosing = f"{1e3 * taken['choosing']:.0f}" if method in (CHOSEN, KERNEL) else ""
        centres = f"{np.mean([row['centres'] for row in rows]):.0f}" if "centres" in rows[0] else ""
        lines.append(
            f"| {method} | {choosing} | {1e3 * taken['fitting']:.2f} | {1e3 * taken['predicting']:.2f} "
            f"| {1e6 * taken['single']:.0f} | {centres} |"
        )
    fitting, predicting, single = (ratio(results, name) for name in ("fitting", "predicting", "single"))
    lines += [
        "",
        f"Beside kernel ridge, ASLM k=1 takes {fitting:.2g} of the time to fit, {predicting:.2g} to predict many rows",
        f"and {single:.2g} to predict one: its store holds as many rows, only the linear part is as quick as ridge.",
    ]
    return "\n".join(lines) + "\n"


def ratio(results: list[dict], name: str) -> float:
    """Median time of ASLM with one neighbour, over that of kernel ridge."""
    ours, other = (np.median([row[name] for row in results if row["method"] == method]) for method in SIDE_BY_SIDE)
    return float(ours / other)


def draw(results: list[dict], path: Path) -> None:
    """A panel per problem: error by noise, on a logarithmic axis."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    table = means(results)
    named = list(dict.fromkeys(problem for problem, _ in table))
    figure, panels = plt.subplots(2, 3, figsize=(10.5, 6), sharex=True, layout="constrained")
    for axes, problem in zip(panels.flat, named):
        for method, colour, marker in zip(METHODS, COLOURS, "os^vDP"):
            errors, spread = zip(*(table[problem, noise][method] for noise in NOISE))
            axes.errorbar(range(len(NOISE)), errors, spread, color=colour, marker=marker, ms=4, lw=1.3, label=method)
        axes.set(title=problem, yscale="log", xticks=range(len(NOISE)), xticklabels=[f"{noise:g}" for noise in NOISE])
        axes.grid(alpha=0.25)
    figure.supxlabel("Noise, share of the signal's standard deviation")
    figure.supylabel("Squared error, share of the target's variance")
    figure.legend(
        *panels[0, 0].get_legend_handles_labels(), loc="outside upper center", ncols=len(METHODS), fontsize=8
    )
    figure.savefig(path, dpi=90)


def rounded(row: dict[str, Any]) -> dict[str, Any]:
    return {name: float(f"{value:.4g}") if isinstance(value, float) else value for name, value in row.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True, help="folder of report.md, results.json and errors.png")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--train", type=int, default=1000, help="rows to learn from, and as many to be judged by")
    arguments = parser.parse_args()
    results = []
    for seed in range(arguments.seeds):
        for problem, noise, learned, judged in problems(arguments.train, seed):
            for method in METHODS:
                results.append({"problem": problem, "noise": noise, "seed": seed} | measured(method, learned, judged))
    arguments.output.mkdir(parents=True, exist_ok=True)
    said = report(results, arguments.seeds, arguments.train)
    (arguments.output / "report.md").write_text(said)
    lines = ",\n".join(f"  {json.dumps(rounded(row))}" for row in results)
    (arguments.output / "results.json").write_text(f'{{"run": {json.dumps(hardware())}, "results": [\n{lines}\n]}}\n')
    draw(results, arguments.output / "errors.png")
    print(said)


if __name__ == "__main__":
    main()
