"""Write prompts like those of `copies.jsonl`, with other contents, to train a drafter for such traffic.

    python experiments/agents/write_prompts.py --texts greedy.jsonl --output prompts.jsonl
    hf-hyperdflash answers --target downloads/SmolLM2-135M-Instruct.Q4_1.gguf --data prompts.jsonl \\
        --output answers.jsonl --max-new-tokens 192 --dtype bfloat16
    hf-hyperdflash train --target downloads/SmolLM2-135M-Instruct.Q4_1.gguf --output_dir my-drafter \\
        --drafter examples/models/smollm2-135m-hyperdflash --dataset answers.jsonl greedy.jsonl --recipe ours

`--texts` has conversations: code blocks of their answers become files to edit, and their paragraphs texts to quote.
Records are composed of the words below. An agent's requests have one form, so these have that of `copies.jsonl`; no
text, file or record of it is here.

The drafter of `results/smollm2-135m/agents/copies-trained` saw 1,152 such answers three times beside 1,500 others: 480
steps of 8 rows and 40 anchors, learning rate 4e-4 (cosine), rows of 768 tokens, bfloat16. Of 12,288 draft tokens in
training it kept the 4,096 most frequent: with all of them a pass took twice as long, which brought less than it cost.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path

from shared import run

from hf_hyperdflash.training.data.file_positions import locating_errors, read_rows
from hf_hyperdflash.training.data.messages import to_messages

NUMBERS = ["first", "second", "third", "fourth"]
SUFFIXES = {"python": "py", "javascript": "js", "java": "java", "html": "html", "css": "css", "sql": "sql",
            "c": "c", "cpp": "cpp", "bash": "sh", "json": "json", "ruby": "rb", "php": "php"}  # fmt: skip
STEMS = "main table report game server users prices words player shop clock map orders search notes tools".split()
BLOCK = re.compile(r"```(\w+)\n(.*?)```", re.DOTALL)

FIRST = "Anna Boris Chloe Dmitri Elif Farid Greta Hugo Irina Jonas Keiko Lars Mira Noah Olga Pavel Rosa Samir".split()
LAST = "Almeida Bergström Costa Dunn Ekholm Fischer Grant Hoffman Ito Jansen Kovac Lopez Moreau Novak Otieno".split()
PLACES = "Basel Bergen Cork Delft Dresden Florence Graz Kyoto Leeds Lyon Malmö Nantes Oslo Pisa Quebec Riga".split()
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
COLOURS = "red green blue yellow white black brown grey orange silver".split()
THINGS = ["bicycle", "desk lamp", "wool coat", "tea kettle", "bookshelf", "garden chair", "violin", "tent", "canoe"]
FOODS = ["rice", "onions", "butter", "flour", "eggs", "lemons", "basil", "tomatoes", "honey", "walnuts", "lentils"]
TASKS = ["repair", "teaching", "archive", "accounting", "printing", "design", "translation", "nursing"]
# A text, and the fields of its record with the words of the text that fill them: none of it fills "dish".
RECORDS = [
    ("The {thing} with the article number {code} costs {price} euros. It comes in {colour} and {colour_2}, weighs "
     "{number} kilograms and is made in {place} by {last} and Sons. {count} of them are in stock.",
     {"product": "thing", "article_number": "code", "price": "price", "colours": ["colour", "colour_2"],
      "weight_kg": "number", "made_in": "place", "stock": "count"}),
    ("{person} works in the {task} department in {place}. The contract began on {date}, and the room is number "
     "{count}. {person_2} is the manager. The telephone extension is {number}.",
     {"employee": "person", "department": "task", "city": "place", "since": "date", "room": "count",
      "manager": "person_2", "extension": "number"}),
    ("On {day} at {time} {person} moves from {place} to {place_2}. The van has the plate {code} and holds {number} "
     "boxes. {person_2} helps with the {thing}.",
     {"day": "day", "time": "time", "customer": "person", "from": "place", "to": "place_2", "plate": "code",
      "boxes": "number", "helper": "person_2"}),
    ("For this soup you need {food}, {food_2} and {food_3}. It serves {number} people and takes {count} minutes. "
     "{person} from {place} sent us the recipe on {date}.",
     {"dish": "", "ingredients": ["food", "food_2", "food_3"], "people": "number", "minutes": "count",
      "sent_by": "person", "town": "place", "date": "date"}),
    ("The museum of {place} opens its exhibition about the {thing} on {date}. It has {count} objects, and a ticket "
     "costs {price} euros. The guide is {person}. On {day} it is closed.",
     {"museum": "place", "about": "thing", "opens": "date", "objects": "count", "ticket": "price",
      "guide": "person", "closed": "day"}),
    ("Ticket {code}: {person} reports that the {task} program stops when a file has more than {count} rows. It was "
     "seen on {date} in release {version}. {person_2} will look at it before {day}.",
     {"ticket": "code", "reporter": "person", "program": "task", "rows": "count", "date": "date",
      "release": "version", "assigned_to": "person_2"}),
    ("{person}, born in {place} in {year}, wrote {number} novels. The best known is \"The {colour} {thing}\" of "
     "{year_2}. It was printed {count} times and translated by {person_2}.",
     {"author": "person", "born_in": "place", "born": "year", "novels": "number", "published": "year_2",
      "printed": "count", "translator": "person_2"}),
    ("The ferry {code} leaves {place} on {day} at {time} and reaches {place_2} after {number} hours. A cabin costs "
     "{price} euros. The captain is {person}, and {count} passengers are on board.",
     {"ferry": "code", "from": "place", "to": "place_2", "day": "day", "departure": "time", "hours": "number",
      "cabin_eur": "price", "captain": "person", "passengers": "count"}),
    ("We look for a helper in {task}, {number} hours a week, from {date} on. The place of work is {place}. We pay "
     "{price} euros an hour. Write to {person}, {code}.",
     {"job": "task", "hours": "number", "from": "date", "place": "place", "wage": "price", "contact": "person",
      "reference": "code"}),
    ("The flat in {place} has {number} rooms on {count} square metres and was built in {year}. It has a {colour} "
     "kitchen and costs {price} euros a night. {person} has the keys, and guests arrive from {time} on.",
     {"city": "place", "rooms": "number", "area_m2": "count", "built": "year", "kitchen": "colour",
      "price": "price", "host": "person", "arrival": "time"}),
]  # fmt: skip


def words(chance: random.Random) -> dict[str, str]:
    """Draw a word for each kind of value that a record has."""
    price, code = f"{chance.randint(1, 90)}.{chance.choice(['50', '90', '00', '25'])}", chance.choice("ABCDFGKLMRT")
    month, hour = chance.randint(1, 12), chance.randint(6, 22)
    drawn = {
        "price": price, "number": str(chance.randint(2, 24)), "count": str(chance.randint(25, 4000)),
        "code": f"{code}{chance.choice('XKPSVZ')}-{chance.randint(100, 9999)}", "day": chance.choice(DAYS),
        "date": f"20{chance.randint(18, 27)}-{month:02}-{chance.randint(1, 28):02}",
        "time": f"{hour:02}:{chance.randint(0, 11) * 5:02}", "task": chance.choice(TASKS),
        "version": f"{chance.randint(1, 9)}.{chance.randint(0, 12)}.{chance.randint(0, 9)}",
        "thing": chance.choice(THINGS), "year": str(chance.randint(1901, 1960)),
        "year_2": str(chance.randint(1961, 2024)), "last": chance.choice(LAST),
    }  # fmt: skip
    for kind, values in (("place", PLACES), ("colour", COLOURS), ("food", FOODS)):
        drawn |= dict(zip((kind, f"{kind}_2", f"{kind}_3"), chance.sample(values, 3)))
    for kind, first, last in zip(("person", "person_2"), chance.sample(FIRST, 2), chance.sample(LAST, 2)):
        drawn[kind] = f"{first} {last}"
    return drawn


def records(chance: random.Random) -> Iterator[str]:
    while True:
        text, fields = chance.choice(RECORDS)
        sentences = re.split(r"(?<=[.]) (?=[A-Z{])", text)
        if chance.random() < 0.5:  # the fields are not always in the order of the text
            chance.shuffle(sentences)
        drawn, names = words(chance), list(fields)
        if chance.random() < 0.5:
            chance.shuffle(names)
        names = names[: chance.randint(5, len(names))]
        numbers = ("number", "count", "year", "year_2")
        empty = {n: [] if isinstance(fields[n], list) else 0 if fields[n] in numbers else "" for n in names}
        yield (
            f"Read this text:\n\n{' '.join(sentences).format(**drawn)}\n\nFill in this JSON record with what the text "
            f"says:\n\n```json\n{json.dumps(empty, indent=2, ensure_ascii=False)}\n```\n\nWrite the filled record and "
            "nothing else. Use the words of the text."
        )


def edits(answers: list[str], chance: random.Random) -> Iterator[str]:
    blocks = [(kind, code.strip()) for answer in answers for kind, code in BLOCK.findall(answer) if kind in SUFFIXES]
    blocks = [(kind, code) for kind, code in blocks if 200 < len(code) < 900]
    chance.shuffle(blocks)
    for kind, code in blocks:
        if change := a_change(code, chance):
            name = f"{chance.choice(STEMS)}.{SUFFIXES[kind]}"
            yield f"Copy the file `{name}` with one change: {change}\n\n```{kind}\n{code}\n```"


def a_change(code: str, chance: random.Random) -> str | None:
    """Return a change that can be asked for of `code`."""
    names = sorted(set(re.findall(r"\b(?:def|function|class|var|let|const|int) ([a-zA-Z_]\w{3,})", code)))
    numbers, texts = re.findall(r"\b\d{1,4}\b", code), re.findall(r"\"([A-Za-z][\w ,!?]{3,30})\"", code)
    ways = [way for way, there in (("name", names), ("number", numbers), ("text", texts)) if there]
    if not ways:
        return None
    way = chance.choice(ways)
    if way == "name":
        name = chance.choice(names)
        new = chance.choice([f"{name}_new", f"my_{name}", f"{name}_{chance.choice(STEMS)}", f"first_{name}"])
        return f"Rename `{name}` to `{new}`{chance.choice([' everywhere.', '. Nothing else changes.'])}"
    if way == "number":
        number = chance.choice(numbers)
        return f"Change the number {number} to {int(number) + chance.randint(1, 9)}."
    text = chance.choice(texts)
    return f'Change the text "{text}" to "{chance.choice(STEMS)} {text}".'


def quotes(answers: list[str], chance: random.Random) -> Iterator[str]:
    paragraphs = [
        paragraph
        for answer in answers
        for paragraph in answer.split("\n\n")[:-1]  # the last one may be cut
        if 180 < len(paragraph) < 420
        and "\n" not in paragraph
        and "`" not in paragraph
        and len(paragraph.split()) > 25
    ]
    chance.shuffle(paragraphs)
    for start in range(0, len(paragraphs) - 3, 4):
        text, place = paragraphs[start : start + 4], chance.randrange(4)
        begins = " ".join(text[place].split()[:4])
        yield (
            "Read this text:\n\n"
            + "\n\n".join(text)
            + f"\n\nQuote the {NUMBERS[place]} paragraph of the text word for "
            f'word. It begins with "{begins}". Write the paragraph and nothing else.'
        )


def answers_of(path: str) -> Iterator[str]:
    for number, row in enumerate(read_rows(path)):
        with locating_errors(row, number):
            yield str(to_messages(row)[-1]["content"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", required=True, help="a .jsonl file of conversations")
    parser.add_argument("--output", type=Path, required=True, help="a .jsonl file")
    parser.add_argument("--each", type=int, default=400, help="prompts of each kind, at most")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    answers, chance = list(answers_of(arguments.texts)), random.Random(arguments.seed)
    kinds = (edits(answers, chance), quotes(answers, chance), records(chance))
    prompts = [prompt for kind in kinds for prompt, _ in zip(kind, range(arguments.each))]
    chance.shuffle(prompts)
    rows = [{"messages": [{"role": "user", "content": prompt}]} for prompt in prompts]
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    arguments.output.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    run(main)
