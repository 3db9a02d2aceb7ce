"""Questions to put to the target: templates over everyday topics, and text of the Python standard library."""

from __future__ import annotations

import ast
import random
import textwrap
from collections.abc import Iterator

from dmtp_kernels.training.data import Corpus

# fields of a template are drawn from the list of that name
TEMPLATES = (
    "Explain in {few} sentences {why}.",
    "{Why}?",
    "Explain {why} to a {listener}.",
    "Write a {kind} story about {someone} and {something}.",
    "Write a {kind} poem about {something}.",
    "Write a dialogue between {someone} and {someone} about {something}.",
    "Write a Python function that {task}.",
    "Write a {language} program that {task}. Explain the code.",
    "How do I write code in {language} that {task}?",
    "What is the difference between {pair}?",
    "Compare {pair} in a short table.",
    "List {few} {things}.",
    "Name {few} {things} and say one sentence about each.",
    "Translate into {tongue}: {sentence}",
    "How do you say in {tongue}: {sentence}",
    "Solve step by step: {problem}",
    "{Problem} Answer with the number alone.",
    "Give me a recipe for {dish}.",
    "How long does it take to cook {dish}, and what do I need?",
    "Summarise the plot of {work}.",
    "Who made {work}, and why is it famous?",
    "Write a {tone} email that {purpose}.",
    "Write a {tone} letter that {purpose}.",
    "What are the advantages and disadvantages of {invention}?",
    "How does {invention} work?",
    "Describe {invention} to a {listener}.",
    "Write a JSON object that describes {thing} with {few} fields.",
    "Convince me to {activity}.",
    "I want to {activity}. Where do I start?",
    "Give me {few} tips to {activity}.",
    "What happened in the year {year}?",
    "Write an SQL query that {query}.",
    "What should I pack for {few} days in {place} in {month}?",
    "Tell me about the history of {place}.",
    "What is {place} known for?",
    "Define the word '{word}' and use it in a sentence.",
    "Give {few} synonyms of '{word}'.",
    "Rewrite in a {tone} tone: {sentence}",
    "Answer yes or no, then explain: is {invention} good for the environment?",
    "What is the capital of {country}, and how many people live there?",
)
_LISTS = {
    "few": "two; three; four; five; six; seven; ten",
    "kind": "short; funny; sad; strange; hopeful; dark; quiet",
    "listener": "child; student; farmer; new colleague; grandmother",
    "tone": "polite; formal; friendly; cross; short; grateful",
    "language": "C; Java; JavaScript; Rust; Go; Bash; Python; C++",
    "tongue": "French; Spanish; German; Italian; Portuguese",
    "month": "January; April; June; August; October; December",
    "year": "1789; 1815; 1848; 1914; 1929; 1945; 1957; 1977; 1989; 1991; 2001; 2008; 2012",
    "country": "Japan; Brazil; Kenya; Canada; Poland; Egypt; India; Chile; Greece; Vietnam; Sweden; Peru",
    "place": (
        "Rome; Iceland; the Sahara; Tokyo; New Zealand; Cairo; the Alps; Buenos Aires; Istanbul; Scotland; "
        "Hawaii; Berlin"
    ),
    "word": ("resilient; ancient; curious; fragile; abundant; brief; generous; obscure; vivid; hollow; eager; modest"),
    "why": (
        "why the sea is salty; why leaves turn red in autumn; why we dream; why ice floats; why the moon has "
        "phases; how rainbows form; how vaccines work; how bees make honey; why cats purr; how earthquakes "
        "happen; why stars twinkle; how plants make food; why metal feels cold; how the heart pumps blood; why "
        "the days are shorter in winter; how money loses its value; why bread rises; how birds find their way; "
        "why iron rusts; how a cloud becomes rain; why we need sleep; how elections work; why the dinosaurs died "
        "out; how sound travels; why some people are left-handed"
    ),
    "someone": (
        "a retired sailor; a young inventor; a lost robot; an old teacher; a clever fox; a nervous king; two "
        "brothers; a baker; a traveller from the future; a gardener; a detective; a shy dragon; a violinist; a "
        "doctor on a small island; a girl who cannot sleep; a mountain guide"
    ),
    "something": (
        "a broken clock; the last train home; an empty house; the first snow; a secret map; a forgotten song; the "
        "price of bread; a storm at sea; a letter without a name; the end of summer; a garden in the desert; the "
        "river behind the village; a stolen painting; the stars; friendship; a long journey"
    ),
    "task": (
        "sorts a list of numbers; counts the words in a text; checks whether a word is a palindrome; finds the "
        "largest number in a list; reads a file line by line; computes the factorial of a number; removes "
        "duplicates from a list; adds two matrices; checks whether a number is prime; converts Celsius to "
        "Fahrenheit; merges two dictionaries; counts vowels in a string; computes the average of a list; finds "
        "the greatest common divisor; prints the multiplication table; searches a sorted array; builds a stack "
        "with push and pop; generates a random password; validates an email address; sums the digits of a number"
    ),
    "pair": (
        "a lake and a pond; weather and climate; a list and a tuple; mass and weight; a process and a thread; "
        "coffee and tea; alligators and crocodiles; a comet and an asteroid; TCP and UDP; butter and margarine; a "
        "lawyer and a judge; stocks and bonds; speed and velocity; jam and jelly; an atom and a molecule; a novel "
        "and a novella; RAM and a hard disk; fruits and vegetables; a republic and a monarchy; bees and wasps"
    ),
    "things": (
        "fruits rich in vitamin C; rivers in Europe; animals that live in the desert; sports played with a ball; "
        "musical instruments; famous scientists; trees that lose their leaves; uses of copper; ways to save "
        "water; good breakfast dishes; inventions of the nineteenth century; languages spoken in Africa; "
        "programming languages; bones of the human body; board games; spices from India; habits of healthy "
        "people; causes of air pollution; islands in the Pacific; gases in the air"
    ),
    "sentence": (
        "The children play in the garden.; I would like a cup of coffee, please.; Where is the nearest station?; "
        "My sister works in a hospital.; It will rain tomorrow morning.; The book on the table is mine.; We have "
        "lived here for ten years.; Can you help me carry this box?; The shop is closed on Sundays.; He forgot "
        "his keys at home again.; This meeting could have been a message.; Dinner is ready."
    ),
    "dish": (
        "tomato soup; apple pie; fried rice; vegetable curry; banana bread; roast chicken; lentil stew; chocolate "
        "cake; potato salad; spaghetti with garlic; scrambled eggs; mushroom risotto; fish tacos; oatmeal "
        "cookies; onion soup"
    ),
    "work": (
        "Hamlet; The Odyssey; Don Quixote; Pride and Prejudice; Moby Dick; Frankenstein; The Great Gatsby; "
        "Cinderella; Little Red Riding Hood; Macbeth; The Mona Lisa; The Starry Night; Alice in Wonderland; "
        "Robinson Crusoe; The Ninth Symphony"
    ),
    "purpose": (
        "asks for a day off; thanks a neighbour for help; complains about a late delivery; invites friends to a "
        "birthday party; applies for a summer job; cancels a subscription; asks a teacher for advice; apologises "
        "for a mistake; recommends a former student; asks for a refund; announces a new office; says goodbye to "
        "the team"
    ),
    "invention": (
        "solar power; the steam engine; a microwave oven; the bicycle; a washing machine; nuclear energy; the "
        "printing press; a smartphone; public transport; a wind turbine; the internet; a battery; online "
        "shopping; working from home; a dam; plastic; a telescope; a search engine"
    ),
    "thing": (
        "a car; a movie; a student; a restaurant; a flight; a song; a dog; a hospital; an order in a shop; a "
        "football team; a city; a computer"
    ),
    "activity": (
        "learn to cook; run a marathon; read more books; grow tomatoes; learn a new language; save money; stop "
        "smoking; travel alone; sleep better; paint; learn chess; get a dog; drink more water; write a novel; "
        "learn to program; study for an exam"
    ),
    "query": (
        "returns all customers from Spain; finds the most expensive product; counts the employees of each "
        "department; joins two tables by id; deletes old records; updates the price of a product; lists the ten "
        "newest orders; computes the average salary; finds names that start with A; creates a table of books"
    ),
}
FIELDS = {name: values.split("; ") for name, values in _LISTS.items()}
PROBLEMS = (
    "a train travels {a} miles in {b} hours. How fast is it?",
    "Anna has {a} apples and gives {b} to each of her {c} friends. How many are left?",
    "a book costs ${b} and a pen costs ${c}. What do {b} books and {a} pens cost?",
    "a rectangle is {a} cm long and {b} cm wide. What is its area?",
    "what is {a} percent of {d}?",
    "{c} workers need {a} days for a wall. How long do {b} workers need?",
    "a tank holds {d} litres and loses {b} litres an hour. When is it empty?",
    "find x: {b}x + {c} = {a}.",
)
ABOUT_TEXT = (
    "Explain this sentence from a manual: {text}",
    "Summarise in one sentence: {text}",
    "What does this documentation mean? {text}",
    "Rewrite in simple words: {text}",
    "Ask a question that this text answers: {text}",
)
ABOUT_CODE = (
    "What does this Python code do?\n{text}",
    "Explain this function step by step:\n{text}",
    "Write a docstring for this function:\n{text}",
    "Find a bug in this code, or say that it is right:\n{text}",
)
SHARE_OF_LIBRARY = 0.3
"""Prompts of a batch that quote the standard library."""


def make_prompts(corpus: Corpus, count: int, seed: int) -> list[str]:
    """`count` different prompts, a function of corpus and seed."""
    chooser = random.Random(seed)
    texts, code = _library_texts(corpus)
    found: dict[str, None] = {}
    while len(found) < count:
        if chooser.random() < SHARE_OF_LIBRARY:
            templates, pieces = chooser.choice(((ABOUT_TEXT, texts), (ABOUT_CODE, code)))
            found[chooser.choice(templates).replace("{text}", chooser.choice(pieces))] = None
        else:
            found[_from_template(chooser)] = None
    return list(found)


def _from_template(chooser: random.Random) -> str:
    text = chooser.choice(TEMPLATES)
    for name, values in FIELDS.items():
        while f"{{{name}}}" in text:
            text = text.replace(f"{{{name}}}", chooser.choice(values), 1)
    why, problem = chooser.choice(FIELDS["why"]), chooser.choice(PROBLEMS)
    numbers = {"a": chooser.randint(12, 90), "b": chooser.randint(2, 9), "c": chooser.randint(2, 9)}
    problem = problem.format(**numbers, d=10 * chooser.randint(5, 60))
    text = text.replace("{Why}", why[0].upper() + why[1:])
    return text.replace("{problem}", problem).replace("{Problem}", problem[0].upper() + problem[1:])


def _library_texts(corpus: Corpus) -> tuple[list[str], list[str]]:
    """First paragraphs of docstrings, and short functions without theirs, of the training files."""
    texts: dict[str, None] = {}
    code: dict[str, None] = {}
    for content in corpus.split(held_out=False).values():
        for node, source in _functions(content.decode(errors="replace")):
            summary = " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split())
            if 40 <= len(summary) <= 240:
                texts[summary] = None
            if len(source) <= 240 and len(node.body) > 1:
                code[source] = None
    return list(texts), list(code)


def _functions(source: str) -> Iterator[tuple[ast.FunctionDef, str]]:
    lines = source.splitlines()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef):
            yield node, textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno]))
