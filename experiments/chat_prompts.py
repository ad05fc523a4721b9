"""Prompts of everyday chat: questions, essays, e-mails, comparisons, role play, a follow-up for some.

    python experiments/chat_prompts.py --output chat.jsonl
    python experiments/chat_prompts.py --toolformer toolformer-dedupe-only-dataset.json \
        --self-instruct seed_tasks.jsonl user_oriented_instructions.jsonl --not-of FOLDER_OF_SUITES --output chat.jsonl

The first command needs nothing: tasks and subjects below are put together by chance. The second one adds general
questions from GPTeacher's toolformer set (MIT) and Self-Instruct's instructions by people (Apache-2.0), and leaves out
what shares eight words in a row with a prompt of a suite. `hf-hyperdflash answers` lets a target answer them.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path

FOLLOWED_UP, SHARED_WORDS, LONGEST = 0.25, 8, 1500  # share of prompts with a second turn; words; characters

SUBJECTS = """the French Revolution; photosynthesis; remote work; learning to cook; climate change; black holes;
the stock market; inflation; electric cars; the human heart; vaccines; the Roman Empire; jazz music; the printing
press; meditation; a healthy breakfast; time management; public speaking; the water cycle; volcanoes; earthquakes;
coral reefs; the Great Wall of China; artificial intelligence; social media; online privacy; a job interview; a
first apartment; learning a new language; the industrial revolution; supply and demand; democracy; the scientific
method; gravity; DNA; evolution; the solar system; the moon landing; renewable energy; nuclear power; recycling;
deforestation; bees; dogs and their owners; raising a kitten; gardening in a small space; growing tomatoes; baking
bread; coffee; tea; chocolate; a vegetarian diet; running a marathon; yoga; sleep; stress at work; burnout;
friendship; a difficult boss; teamwork; leadership; negotiating a salary; saving money; buying a house; credit
cards; taxes; starting a small business; a food truck; a bookshop; a mobile app for hikers; a new smartphone;
wearable devices; video games; chess; football; the Olympic Games; Shakespeare; poetry; science fiction; fairy
tales; the Renaissance; impressionist painting; photography; architecture; bridges; trains; air travel; a trip to
Japan; a weekend in Paris; hiking in the Alps; camping with children; the beach; winter; autumn leaves; a rainy
day; the night sky; lighthouses; libraries; museums; schools without homework; teaching mathematics; learning the
piano; the violin; a school play; university life; student loans; a thesis; plagiarism; critical thinking; logic;
ethics; free will; happiness; courage; honesty; kindness; forgiveness; justice; human rights; the rule of law;
elections; trade unions; globalization; immigration; poverty; hunger; clean water; public health; antibiotics;
cancer research; allergies; first aid; diabetes; the immune system; the brain; memory; dreams; emotions;
psychology; habits; motivation; creativity; design thinking; open-source software; databases; computer networks;
cybersecurity; passwords; cloud computing; robots; self-driving cars; drones; 3D printing; space tourism; Mars;
telescopes; quantum computers; semiconductors; batteries; solar panels; wind turbines; the greenhouse effect;
hurricanes; the Amazon rainforest; the Sahara; Antarctica; whales; penguins; elephants; dinosaurs; fossils; the
Middle Ages; the Silk Road; the Cold War; the Great Depression; ancient Egypt; ancient Greece; the invention of the
telephone; the internet; newspapers; advertising; brand loyalty; customer service; e-mail etiquette; a wedding
speech; a birthday party; a retirement; a lost suitcase; a broken dishwasher; noisy neighbours; a late delivery; a
power cut"""

TASKS = """What is the most important thing to know about {}?
Explain {} to a ten-year-old.
Explain {} in simple terms, with an example.
Write a short essay about {}.
Write a blog post of about 150 words on {}.
Write a poem about {}.
Write a short story that begins with a sentence about {}.
Write the introduction of a speech about {}.
List five interesting facts about {}.
List the advantages and disadvantages of {}.
Give me three tips on {}.
What are common mistakes people make with {}?
What are the arguments for and against {}?
How has {} changed over the last hundred years?
How would the world look without {}?
Why do people care about {}?
What questions should I ask an expert about {}?
Describe {} as if you were there.
Summarize what you know about {} in two sentences.
Write an e-mail to a friend about {}.
Write a formal e-mail to my manager about {}.
Write a product description that has to do with {}.
Write a dialogue between a teacher and a student about {}.
Imagine that you are a journalist. Report on {}.
Imagine that you are a doctor. What do you tell a patient about {}?
Act as a travel guide who has an opinion on {}.
Act as an economist. What does {} cost, and who pays for it?
Make a plan for a week that has to do with {}.
Make a table with three columns about {}.
Propose four catchy headlines for an article about {}.
Write a quiz with three questions about {}, with answers.
Is {} overrated? Give reasons.
Extract the key ideas one should remember about {} as a numbered list.
Tell me the history of {} step by step.
How does {} work?
What is the connection between {} and {}?
Compare {} with {}.
Which matters more in daily life, {} or {}? Explain your choice."""

FOLLOW_UPS = """Rewrite your answer in a shorter form.
Can you give me an example?
Rewrite your previous response for a child.
What would somebody say who disagrees with you?
Make it more formal.
Make it funnier.
Turn your answer into a list.
Which of these points is the most important, and why?
Go into more detail on the first point.
Now write it as a letter.
Summarize that in one sentence.
What should I read next?"""


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True, help="a .jsonl file of `turns`")
    parser.add_argument("--made", type=int, default=2500, help="prompts put together from tasks and subjects")
    parser.add_argument("--toolformer", type=Path, help="GPTeacher's .json file")
    parser.add_argument("--self-instruct", type=Path, nargs="*", default=[], help="Self-Instruct's .jsonl files")
    parser.add_argument("--not-of", type=Path, help="folder of SUITE.jsonl whose prompts are left out")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    chance = random.Random(0)
    prompts = list(made_prompts(chance, arguments.made))
    if arguments.toolformer:
        prompts += general_questions(arguments.toolformer)
    for path in arguments.self_instruct:
        prompts += instructions(path)
    forbidden = set()
    for path in arguments.not_of.glob("*.jsonl") if arguments.not_of else []:
        for line in path.read_text(encoding="utf-8").splitlines():
            for turn in json.loads(line)["turns"]:
                forbidden |= word_runs(turn)
    kept, seen = [], set()
    for prompt in prompts:
        key = prompt.lower().strip(" .?!")
        if key not in seen and len(prompt) <= LONGEST and not word_runs(prompt) & forbidden:
            seen.add(key)
            kept.append(prompt)
    chance.shuffle(kept)
    follow_ups = FOLLOW_UPS.split("\n")
    with arguments.output.open("w", encoding="utf-8") as file:
        for prompt in kept:
            turns = [prompt, chance.choice(follow_ups)] if chance.random() < FOLLOWED_UP else [prompt]
            file.write(json.dumps({"turns": turns}, ensure_ascii=False) + "\n")
    print(f"{len(kept)} prompts, {len(prompts) - len(kept)} left out: repeated, too long, or of a suite")


def made_prompts(chance: random.Random, count: int) -> Iterator[str]:
    subjects, tasks = [" ".join(subject.split()) for subject in SUBJECTS.split(";")], TASKS.split("\n")
    for _ in range(count):
        task = chance.choice(tasks)
        yield task.format(*chance.sample(subjects, task.count("{}")))


def general_questions(path: Path) -> list[str]:
    """Return the questions whose tool was a search or an encyclopedia, without the lines about tools."""
    found = []
    for row in json.loads(path.read_text(encoding="utf-8")):
        _, tool, *_, question = row["instruction"].strip().split("\n")
        if tool.removeprefix("toolformer access: ") in ("search", "wikipedia", "wolfram"):
            found.append("\n".join(filter(None, [question.strip(), row["input"].strip()])))
    return found


def instructions(path: Path) -> list[str]:
    """Return each instruction with its first input."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [
        "\n".join(filter(None, [row["instruction"].strip(), row["instances"][0]["input"].strip()])) for row in rows
    ]


def word_runs(text: str) -> set[tuple[str, ...]]:
    words = text.lower().split()
    return {tuple(words[at : at + SHARED_WORDS]) for at in range(len(words) - SHARED_WORDS + 1)}


if __name__ == "__main__":
    main()
