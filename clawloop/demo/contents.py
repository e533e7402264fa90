"""Data of the demo's world: functions to write, topics to explain, notes to send.

Every answer is fixed, so that a program can grade it. A subject's index decides whether it is for chats or for
evaluation (`world.py`).
"""

from __future__ import annotations

# Description: (Python, JavaScript).
FUNCTIONS = {
    "adds two numbers": ("def add(a, b):\n    return a + b", "function add(a, b) {\n  return a + b;\n}"),
    "multiplies two numbers": ("def times(a, b):\n    return a * b", "function times(a, b) {\n  return a * b;\n}"),
    "subtracts two numbers": ("def minus(a, b):\n    return a - b", "function minus(a, b) {\n  return a - b;\n}"),
    "divides two numbers": ("def divide(a, b):\n    return a / b", "function divide(a, b) {\n  return a / b;\n}"),
    "finds the larger number": (
        "def larger(a, b):\n    return max(a, b)",
        "function larger(a, b) {\n  return Math.max(a, b);\n}",
    ),
    "finds the smaller number": (
        "def smaller(a, b):\n    return min(a, b)",
        "function smaller(a, b) {\n  return Math.min(a, b);\n}",
    ),
    "squares a number": ("def square(x):\n    return x * x", "function square(x) {\n  return x * x;\n}"),
    "doubles a number": ("def double(x):\n    return 2 * x", "function double(x) {\n  return 2 * x;\n}"),
    "halves a number": ("def half(x):\n    return x / 2", "function half(x) {\n  return x / 2;\n}"),
    "checks if a number is even": (
        "def is_even(n):\n    return n % 2 == 0",
        "function isEven(n) {\n  return n % 2 === 0;\n}",
    ),
    "checks if a number is odd": (
        "def is_odd(n):\n    return n % 2 == 1",
        "function isOdd(n) {\n  return n % 2 === 1;\n}",
    ),
    "checks if a list is empty": (
        "def is_empty(xs):\n    return len(xs) == 0",
        "function isEmpty(xs) {\n  return xs.length === 0;\n}",
    ),
    "reverses a string": (
        "def reverse(s):\n    return s[::-1]",
        "function reverse(s) {\n  return s.split('').reverse().join('');\n}",
    ),
    "sums a list": (
        "def total(xs):\n    return sum(xs)",
        "function total(xs) {\n  return xs.reduce((a, b) => a + b, 0);\n}",
    ),
    "counts the items of a list": (
        "def count(xs):\n    return len(xs)",
        "function count(xs) {\n  return xs.length;\n}",
    ),
    "returns the first item": ("def first(xs):\n    return xs[0]", "function first(xs) {\n  return xs[0];\n}"),
    "returns the last item": (
        "def last(xs):\n    return xs[-1]",
        "function last(xs) {\n  return xs[xs.length - 1];\n}",
    ),
    "turns text to upper case": (
        "def upper(s):\n    return s.upper()",
        "function upper(s) {\n  return s.toUpperCase();\n}",
    ),
    "turns text to lower case": (
        "def lower(s):\n    return s.lower()",
        "function lower(s) {\n  return s.toLowerCase();\n}",
    ),
    "sorts a list": ("def ordered(xs):\n    return sorted(xs)", "function ordered(xs) {\n  return [...xs].sort();\n}"),
    "doubles every item": (
        "def doubled(xs):\n    return [2 * x for x in xs]",
        "function doubled(xs) {\n  return xs.map(x => 2 * x);\n}",
    ),
    "joins two lists": (
        "def joined(xs, ys):\n    return xs + ys",
        "function joined(xs, ys) {\n  return xs.concat(ys);\n}",
    ),
    "trims a string": ("def trim(s):\n    return s.strip()", "function trim(s) {\n  return s.trim();\n}"),
    "splits text into words": (
        "def words(s):\n    return s.split(' ')",
        "function words(s) {\n  return s.split(' ');\n}",
    ),
    "repeats a string": (
        "def repeat(s, n):\n    return s * n",
        "function repeat(s, n) {\n  return s.repeat(n);\n}",
    ),
    "rounds a number": ("def nearest(x):\n    return round(x)", "function nearest(x) {\n  return Math.round(x);\n}"),
    "finds the absolute value": (
        "def size(x):\n    return abs(x)",
        "function size(x) {\n  return Math.abs(x);\n}",
    ),
    "prints a greeting": (
        "def greet(name):\n    print('Hello', name)",
        "function greet(name) {\n  console.log('Hello', name);\n}",
    ),
    "swaps two values": ("def swap(a, b):\n    return b, a", "function swap(a, b) {\n  return [b, a];\n}"),
    "removes empty items": (
        "def kept(xs):\n    return [x for x in xs if x]",
        "function kept(xs) {\n  return xs.filter(x => x);\n}",
    ),
}
FUNCTION_ASKS = (
    "Write a function that {}.",
    "Can you write code that {}?",
    "I need a function that {}.",
    "Show me code that {}.",
    "Please give me a function that {}.",
    "How do I write a function that {}?",
)

# Topic: (short fact, detail, second detail).
TOPICS = {
    "rain": (
        "rain is water that falls from clouds",
        "Water rises from the sea and cools in the sky",
        "Small drops join until they are heavy enough to fall",
    ),
    "the moon": (
        "the moon is a rock that circles the earth",
        "It takes about a month to go around once",
        "It shines because it reflects the light of the sun",
    ),
    "a battery": (
        "a battery stores energy in chemicals",
        "When it is connected they react and push electrons",
        "When the reaction is over the battery is empty",
    ),
    "a cache": (
        "a cache keeps copies of data close by",
        "Reading a copy is faster than asking the source again",
        "Old copies are dropped when the cache is full",
    ),
    "a loop": (
        "a loop repeats the same steps",
        "It checks a condition before each round",
        "It stops when the condition is no longer true",
    ),
    "a tree": (
        "a tree is a tall plant made of wood",
        "Its roots drink water and its leaves catch light",
        "Each year it adds one more ring of wood",
    ),
    "bread": (
        "bread is baked dough of flour and water",
        "Yeast makes bubbles that let the dough rise",
        "The heat of the oven makes the crust brown",
    ),
    "the wind": (
        "the wind is air that moves",
        "Air flows from high pressure to low pressure",
        "The sun drives it by heating some places more",
    ),
    "a database": (
        "a database stores data in order",
        "Tables hold rows and an index helps to find them",
        "Transactions keep the data right when many people write",
    ),
    "a magnet": (
        "a magnet pulls iron",
        "Its atoms all point in the same direction",
        "Equal poles push and different poles pull",
    ),
    "sleep": (
        "sleep is rest for the body and the brain",
        "The brain sorts memories during the night",
        "The body repairs itself and saves energy",
    ),
    "gravity": (
        "gravity pulls masses together",
        "The more mass a thing has the stronger it pulls",
        "It keeps the planets on their way around the sun",
    ),
    "snow": (
        "snow is frozen water from clouds",
        "Ice crystals grow around tiny grains of dust",
        "Each crystal has six arms",
    ),
    "a volcano": (
        "a volcano is a hole through which hot rock comes out",
        "Pressure below the ground pushes the melted rock up",
        "When it cools it becomes new stone",
    ),
    "a river": (
        "a river is water that flows to the sea",
        "It begins at a spring or a melting glacier",
        "On its way other streams join it",
    ),
    "the heart": (
        "the heart pumps blood through the body",
        "One side sends blood to the lungs to fetch oxygen",
        "The other side sends it everywhere else",
    ),
    "a clock": ("a clock shows the time", "Something in it swings at a steady pace", "Gears or chips count the swings"),
    "a compiler": (
        "a compiler turns source code into machine code",
        "First it reads the code and checks its grammar",
        "Then it writes instructions for the processor",
    ),
    "a server": (
        "a server answers requests of other computers",
        "It waits at an address until somebody asks",
        "Many clients can ask at the same time",
    ),
    "a password": (
        "a password is a secret that proves who you are",
        "A long one is harder to guess",
        "Services should store only a hash of it",
    ),
    "a bicycle": (
        "a bicycle is a vehicle with two wheels",
        "The chain carries force from the pedals to the wheel",
        "It stays upright because the rider steers",
    ),
    "a bridge": (
        "a bridge carries a road over a gap",
        "Its pillars lead the weight into the ground",
        "Long ones hang from steel cables",
    ),
    "honey": (
        "honey is sweet food made by bees",
        "Bees collect nectar and dry it in the hive",
        "Sealed with wax it keeps for years",
    ),
    "the sun": (
        "the sun is a star made of hot gas",
        "Deep inside hydrogen becomes helium",
        "Its light needs eight minutes to reach us",
    ),
    "a vaccine": (
        "a vaccine prepares the body for an illness",
        "It shows the body a harmless part of the germ",
        "Later the body knows the germ and reacts fast",
    ),
    "a backup": (
        "a backup is a second copy of your data",
        "It should be kept in another place",
        "Only a restore shows that it works",
    ),
    "glass": (
        "glass is melted sand that cooled down",
        "It is formed while it is hot and soft",
        "Old glass can be melted and used again",
    ),
    "an echo": (
        "an echo is sound that comes back",
        "Sound bounces off a wall or a mountain",
        "The farther away the wall the later it returns",
    ),
    "a firewall": (
        "a firewall blocks unwanted network traffic",
        "It compares each packet with a list of rules",
        "What no rule allows is dropped",
    ),
    "tea": (
        "tea is a drink made from leaves",
        "Hot water takes colour and taste out of them",
        "Green leaves need cooler water than black ones",
    ),
}
TOPIC_ASKS = (
    "What is {}?",
    "Explain {}.",
    "Tell me about {}.",
    "Can you explain {} to me?",
    "I want to know about {}.",
    "Describe {} please.",
)

PEOPLE = (
    "Anna",
    "Ben",
    "Clara",
    "David",
    "Emma",
    "Felix",
    "Grace",
    "Henry",
    "Ida",
    "Jonas",
    "Karin",
    "Leo",
    "Mia",
    "Noah",
    "Olga",
    "Paul",
    "Rosa",
    "Sam",
    "Tom",
    "Vera",
)
EVENTS = (
    "the meeting on Monday",
    "the new office",
    "the project plan",
    "the lunch on Friday",
    "the late train",
    "the budget",
    "the open door",
    "the summer party",
    "the broken printer",
    "the next release",
    "the travel report",
    "the team photo",
    "the lost keys",
    "the coffee machine",
    "the changed address",
    "the long queue",
    "the first draft",
    "the missing invoice",
)
NOTE_ASKS = (
    "Write a note to {} about {}.",
    "Send {} a message about {}.",
    "Draft an email to {} about {}.",
    "Please write to {} about {}.",
    "I need a message for {} about {}.",
    "Help me tell {} about {}.",
)
