"""Words that may follow a value: units with their factors, counted things, and words for numbers. Pure.

Owns the list of known words. Another word is no unit, so that "5 million" or "5 maybe" never counts for 5.
"""

import re
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from fractions import Fraction

# by dimension: the number of base units that a name stands for
UNITS = {
    "length": {
        "1": "m meter meters metre metres", "1/100": "cm centimeter centimeters centimetre centimetres",
        "1/1000": "mm millimeter millimeters millimetre millimetres", "1/1000000": "micrometer micrometers micron microns",
        "1/1000000000": "nm nanometer nanometers", "1/10": "dm decimeter decimeters",
        "1000": "km kilometer kilometers kilometre kilometres", "127/5000": "in inch inches", "381/1250": "ft foot feet",
        "1143/1250": "yd yard yards", "201168/125": "mi mile miles",
    },
    "mass": {
        "1": "g gram grams", "1000": "kg kilogram kilograms kilo kilos", "1/1000": "mg milligram milligrams",
        "45359237/100000": "lb lbs", "45359237/1600000": "oz ounce ounces", "1000000": "ton tons tonne tonnes",
    },
    "time": {
        "1": "s sec secs second seconds", "1/1000": "ms millisecond milliseconds", "60": "min mins minute minutes",
        "3600": "h hr hrs hour hours", "86400": "d day days", "604800": "week weeks",
    },
    "year": {"1": "yr yrs year years", "1/12": "month months", "10": "decade decades", "100": "century centuries"},
    "volume": {
        "1": "l L liter liters litre litres", "1/1000": "ml mL milliliter milliliters millilitre millilitres",
        "1/100": "cl cL centiliter centiliters",
    },
    "gallon": {"1": "gal gallon gallons", "1/4": "quart quarts", "1/8": "pint pints", "1/16": "cup cups"},
    "area": {"1": "hectare hectares ha"}, "acre": {"1": "acre acres"},
    "dollar": {"1": "dollar dollars usd USD bucks", "1/100": "cent cents"},
    "euro": {"1": "euro euros EUR"}, "pound": {"1": "pound pounds GBP"}, "rupee": {"1": "rupee rupees Rs"},
    "yen": {"1": "yen JPY"}, "yuan": {"1": "yuan RMB CNY"}, "peso": {"1": "peso pesos"},
    "angle": {"1": "degree degrees deg"}, "radian": {"1": "rad radian radians"},
    "celsius": {"1": "celsius Celsius C"}, "fahrenheit": {"1": "fahrenheit Fahrenheit F"}, "kelvin": {"1": "K kelvin kelvins"},
    "force": {"1": "N newton newtons", "1000": "kN"}, "energy": {"1": "J joule joules", "1000": "kJ", "1000000": "MJ"},
    "calorie": {"1": "cal calorie calories", "1000": "kcal"}, "electronvolt": {"1": "eV", "1000": "keV", "1000000": "MeV"},
    "power": {"1": "W watt watts", "1000": "kW kilowatt kilowatts", "1000000": "MW"},
    "voltage": {"1": "V volt volts", "1/1000": "mV", "1000": "kV"}, "current": {"1": "A amp amps ampere amperes", "1/1000": "mA"},
    "resistance": {"1": "ohm ohms", "1000": "kohm"}, "charge": {"1": "coulomb coulombs"},
    "pressure": {"1": "Pa pascal pascals", "1000": "kPa"}, "atmosphere": {"1": "atm"}, "frequency": {"1": "Hz hertz", "1000": "kHz", "1000000": "MHz"},
    "amount": {"1": "mol mole moles", "1/1000": "mmol"}, "concentration": {"1": "M molar"},
    "tesla": {"1": "T tesla"}, "byte": {"1": "byte bytes B", "1000": "KB kB", "1000000": "MB", "1000000000": "GB"}, "bit": {"1": "bit bits"},
    "unit": {"1": "unit units"},
}  # fmt: skip
SPEEDS = {"mph": ("mi", "h"), "kph": ("km", "h"), "kmph": ("km", "h"), "kmh": ("km", "h")}
COUNTED = """
    answer apple apples arrangement arrangements bag bags ball balls balloon balloons banana bananas bean beans bird birds
    block blocks boat boats book books bottle bottles bowl bowls box boxes boy boys bracelet bracelets bus buses cake cakes
    candle candles candy candies card cards car cars case cases cat cats chair chairs chicken chickens child children
    chocolate chocolates choice choices circle circles class classes clip clips coin coins color colors combination
    combinations cookie cookies cow cows crayon crayons cube cubes cupcake cupcakes customer customers desk desks diagonal
    diagonals dice digit digits dime dimes divisor divisors dog dogs doll dolls donut donuts duck ducks edge edges egg eggs
    employee employees envelope envelopes eraser erasers face faces factor factors family families fish flower flowers
    friend friends fruit fruits game games girl girls glass glasses grape grapes guest guests hat hats horse horses house
    houses integer integers item items jar jars kid kids lap laps leaf leaves lemon lemons letter letters line lines loaf
    loaves man men marble marbles match matches meal meals member members method methods mile muffin muffins nail nails
    nickel nickels number numbers orange oranges outcome outcomes package packages packet packets page pages painting
    paintings pair pairs paper papers path paths peach peaches pear pears pebble pebbles pen pens pencil pencils penny
    pennies people permutation permutations person persons photo photos pie pies piece pieces pizza pizzas plant plants
    plate plates player players point points possibility possibilities potato potatoes prime primes problem problems puppy
    puppies question questions rabbit rabbits rectangle rectangles ribbon ribbons ring rings root roots rose roses round
    rounds row rows sandwich sandwiches seat seats shell shells sheep sheet sheets shirt shirts shoe shoes side sides slice
    slices sock socks solution solutions song songs spoon spoons square squares stamp stamps star stars step steps sticker
    stickers stone stones student students subset subsets sweet sweets table tables teacher teachers team teams term terms
    ticket tickets tile tiles times tomato tomatoes toy toys train trains tree trees triangle triangles trip trips truck
    trucks value values vertex vertices visitor visitors vote votes watermelon watermelons way ways wheel wheels window
    windows woman women word words worker workers worm worms zero zeros zeroes animal animals bike bikes bunch bunches
    bushes bush carrot carrots chapter chapters cherry cherries crab crabs dress dresses drink drinks elephant elephants fan
    fans feather feathers field fields finger fingers floor floors frog frogs gift gifts goal goals goat goats hen hens hole
    holes jewel jewels key keys lamp lamps lesson lessons lion lions magazine magazines mango mangoes mangos mask masks
    medal medals message messages monkey monkeys mouse mice movie movies mug mugs notebook notebooks passenger passengers
    pig pigs pigeon pigeons pillow pillows plum plums pot pots present presents prize prizes raisin raisins ride rides robot
    robots room rooms seed seeds shelf shelves ship ships soldier soldiers spider spiders strawberry strawberries street
    streets string strings tank tanks task tasks tiger tigers tool tools turtle turtles vehicle vehicles video videos week
    wolf wolves
""".split()  # noqa: SIM905 - a word a line would hide the code
WORTH = {
    "hundred": Fraction(100), "thousand": Fraction(1000), "million": Fraction(10**6), "billion": Fraction(10**9),
    "trillion": Fraction(10**12), "dozen": Fraction(12), "half": Fraction(1, 2), "quarter": Fraction(1, 4), "third": Fraction(1, 3),
    "fourth": Fraction(1, 4), "fifth": Fraction(1, 5), "sixth": Fraction(1, 6), "seventh": Fraction(1, 7), "eighth": Fraction(1, 8),
    "ninth": Fraction(1, 9), "tenth": Fraction(1, 10), "twelfth": Fraction(1, 12), "hundredth": Fraction(1, 100),
    "thousandth": Fraction(1, 1000), "millionth": Fraction(1, 10**6), "halves": Fraction(1, 2),
}  # fmt: skip
WORTH |= {f"{word}s": worth for word, worth in WORTH.items() if word != "halves"}
# words of a prompt that are never counted things
NEVER_COUNTED = {
    *WORTH,
    *"""
    pi plus minus times over divided multiplied power powers squared cubed factorial negative positive percent percentage
    root maybe perhaps possibly probably alternatively versus unless except not never none neither nor either both and but
    yet than then more less least most about around approximately roughly almost nearly between until under above below the
    for with without from into are was were has have had been being will would could should might must may can cannot does
    did dozen score gross couple double triple twice thrice square cube inverse reciprocal opposite even odd modulo mod
    infinity infinite wrong incorrect false true correct inclusive exclusive otherwise instead rather only all some any each
    every per if else or so one two three four five six seven eight nine ten eleven twelve twenty thirty forty fifty sixty
    seventy eighty ninety first second mean degree degrees radians base
    """.split(),  # noqa: SIM905
}
POWERS = {"square": 2, "sq": 2, "squared": 2, "cubic": 3, "cu": 3, "cubed": 3}
NAMES = {
    name: (dimension, Fraction(factor))
    for dimension, factors in UNITS.items()
    for factor, names in factors.items()
    for name in names.split()
}
NAMES |= {name: (name, Fraction(1)) for name in COUNTED if name not in NAMES}
IRREGULAR = {"people": "person", "men": "man", "women": "woman", "children": "child", "mice": "mouse", "dice": "die",
             "loaves": "loaf", "leaves": "leaf", "shelves": "shelf", "wolves": "wolf", "vertices": "vertex"}  # fmt: skip
PART = re.compile(r"([a-zA-Z]+)(?:\^\{?(-?\d)\}?)?")
WORD = re.compile(r"[a-zA-Z]+")


@dataclass(frozen=True)
class Unit:
    """A unit's dimensions with their powers, and the number of base units that it stands for."""

    dimensions: tuple[tuple[str, int], ...]
    factor: Fraction = Fraction(1)


def unit_of(text: str, power: str | None = None, own: Collection[str] = ()) -> Unit | None:
    """The unit that a text names: "m/s^2", "square feet", "miles per hour", "apples". None if a word of it is unknown.

    power: of the whole unit, written after it. own: further counted things, such as the words of the prompt.
    """
    text = re.sub(r"\bper\b", "/", text.replace("\\cdot", " ").replace("*", " "))
    words = re.findall(r"/|[^\s/]+", text)
    if not words or len(words) > 8:
        return None
    parts: list[tuple[str, Fraction, int]] = []
    sign, raised = 1, 1
    for word in words:
        if word == "/":
            sign = -1
        # as in "meters squared"
        elif word.lower() in POWERS and word.lower().endswith("d") and parts:
            parts[-1] = (*parts[-1][:2], parts[-1][2] * POWERS[word.lower()])
        elif word.lower() in POWERS:
            raised = POWERS[word.lower()]
        else:
            part = PART.fullmatch(word)
            names = SPEEDS.get(part[1].lower(), (part[1],)) if part else ()
            known = [_known(name, own) for name in names]
            if part is None or None in known:
                return None
            times = sign * int(part[2] or raised)
            parts += [(*found, times if at == 0 else -times) for at, found in enumerate(known) if found]
            raised = 1
    dimensions: Counter[str] = Counter()
    factor = Fraction(1)
    for dimension, worth, times in parts:
        times *= int(power or 1)
        dimensions[dimension] += times
        factor *= worth**times
    return Unit(tuple(sorted(dimensions.items())), factor) if parts else None


def is_word(text: str) -> bool:
    """Whether letters in a row are a word rather than a product of variables."""
    return len(text) > 3 or text.lower() in SHORT or (len(text) > 1 and _known(text, ()) is not None)


def _known(name: str, own: Collection[str]) -> tuple[str, Fraction] | None:
    found = NAMES.get(name) or (NAMES.get(name.lower()) if len(name) > 1 else None)
    if found is None and name.lower() in own:
        found = (name.lower(), Fraction(1))
    if found is None:
        return None
    dimension, factor = found
    # counted things have one name in singular and plural
    if dimension == name.lower():
        dimension = IRREGULAR.get(dimension) or re.sub(r"(?<=[^s])s$|(?<=x|h|s)es$", "", dimension)
    return dimension, factor


SHORT = {
    "or", "and", "to", "if", "not", "no", "is", "be", "by", "of", "at", "on", "as", "an", "the", "per", "for", "but", "nor", "yes",
    "am", "pm", "vs", "all", "any", "are", "we", "it", "so", "odd", "up", "than", "else", "sum", "non", "may", "can", "one", "two",
    "six", "ten", "pi", "mod", "max", "inf", "via", "yet",
}  # fmt: skip
