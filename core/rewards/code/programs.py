"""Programs for the sandbox: the first calls functions of an answer, the second runs a row's asserts without the answer.

The two never share a process. The answer's process gets arguments and returns results as text; expected results stay with the
asserts, whose process reads results as plain values. So an answer can end its process, print what it likes, return objects
that equal everything, or search its memory: none of it shows what is expected, or makes an assert hold. Each writes its
findings to a separate file, whose descriptor is its first argument, so that printed output is not mixed in.

Values travel as JSON with a mark at each container: ["l", ...] list, ["t", ...] tuple, ["s", ...] set, ["f", ...] frozenset,
["d", [key, value], ...] dict, ["i", ...] iterator, ["c", real, imaginary] complex, ["b", hex] bytes.
"""

VALUES = '''
import itertools, json, math

class Unsendable(TypeError):
    """A value that has no form outside of its process."""

def encode(value):
    if value is None or isinstance(value, (bool, str)):
        return value if not isinstance(value, str) else str.__str__(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, complex):
        return ["c", value.real, value.imag]
    if isinstance(value, (bytes, bytearray)):
        return ["b", bytes(value).hex()]
    for kind, mark in ((list, "l"), (tuple, "t"), (set, "s"), (frozenset, "f")):
        if isinstance(value, kind):
            return [mark, *map(encode, value)]
    if isinstance(value, dict):
        return ["d", *([encode(key), encode(item)] for key, item in value.items())]
    if isinstance(value, range) or hasattr(value, "__next__"):
        return ["i", *map(encode, itertools.islice(value, 100_000))]
    raise Unsendable(type(value).__name__)

def decode(value):
    if not isinstance(value, list):
        return value
    mark, items = value[0], value[1:]
    if mark == "d":
        return {decode(key): decode(item) for key, item in items}
    if mark == "c":
        return complex(*items)
    if mark == "b":
        return bytes.fromhex(items[0])
    return {"l": list, "t": tuple, "s": set, "f": frozenset, "i": iter}[mark](list(map(decode, items)))
'''

ANSWER = (
    VALUES
    + """
import io, sys

def main():
    given = json.loads(sys.stdin.read())
    out, sys.stdin, sys.stdout = open(int(sys.argv[1]), "w"), io.StringIO(), open("/dev/null", "w")
    names = {"__name__": "answer", "__builtins__": __builtins__}
    exec(compile(given["code"], "answer.py", "exec"), names)
    for at, (name, args, kwargs) in enumerate(given["calls"]):
        function = names.get(name)
        if function is None and hasattr(names.get("Solution"), name):
            function = getattr(names["Solution"](), name)
        try:
            if function is None:
                raise NameError(name)
            said = {"value": encode(function(*decode(args), **decode(kwargs)))}
        except Exception as error:
            said = {"raised": type(error).__name__}
        out.write(f"{at} {json.dumps(said)}\\n")
        out.flush()

main()
"""
)

ASSERTS = (
    VALUES
    + '''
import ast, builtins, sys

class Unknown:
    """Stands for a result that is not there yet: it can be computed with, and every comparison holds."""
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return self
    def __iter__(self):
        return iter(())
    def __hash__(self):
        return 0

for name in "add radd sub rsub mul rmul truediv rtruediv floordiv rfloordiv mod rmod pow rpow neg pos abs round getitem call and or".split():
    setattr(Unknown, f"__{name}__", lambda self, *_, **__: self)
for name in "eq ne lt le gt ge contains bool".split():
    setattr(Unknown, f"__{name}__", lambda self, *_: True)
for name, value in {"len": 0, "int": 0, "index": 0, "float": 0.0, "str": "", "repr": ""}.items():
    setattr(Unknown, f"__{name}__", lambda self, *_, value=value: value)

def unknown_in(value):
    if isinstance(value, dict):
        return any(map(unknown_in, value.values()))
    return isinstance(value, Unknown) or isinstance(value, (list, tuple)) and any(map(unknown_in, value))

def free_names(tree):
    """Names that are read, and that nothing in the tests or in Python defines."""
    read, known = [], set(dir(builtins))
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            (read.append if isinstance(node.ctx, ast.Load) else known.add)(node.id)
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef)):
            known.add(node.name)
        elif isinstance(node, ast.arg):
            known.add(node.arg)
        elif isinstance(node, ast.alias):
            known.add((node.asname or node.name).partition(".")[0])
        elif isinstance(node, ast.ExceptHandler) and node.name:
            known.add(node.name)
    return [name for name in dict.fromkeys(read) if name not in known]

def main():
    given = json.loads(sys.stdin.read())
    asked, unsendable = {}, []

    def stand_in(name):
        def call(*args, **kwargs):
            if unknown_in(args) or unknown_in(kwargs):
                return Unknown()
            try:
                sent = [name, encode(list(args)), encode(kwargs)]
            except Unsendable as error:
                unsendable.append(str(error))
                raise
            key = json.dumps(sent)
            if key not in given["results"]:
                asked[key] = sent
                return Unknown()
            said = json.loads(given["results"][key])
            if "value" in said:
                return decode(said["value"])
            kind = getattr(builtins, str(said.get("raised")), None)
            raise (kind if isinstance(kind, type) and issubclass(kind, Exception) else RuntimeError)(name)
        call.__name__ = name
        return call

    verdicts = []
    for source in given["sources"]:
        try:
            tree = ast.parse(source)
        except SyntaxError as error:
            verdicts.append(f"unusable: {error}")
            continue
        names = {"__name__": "tests"}
        names |= {name: stand_in(name) for name in given["names"] or free_names(tree)}
        try:
            exec(compile(tree, "tests.py", "exec"), names)
            verdicts.append("passed")
        except Exception as error:
            verdicts.append(f"failed: {type(error).__name__}")
    report = {"asked": asked, "verdicts": verdicts, "unsendable": unsendable}
    with open(int(sys.argv[1]), "w") as out:
        json.dump(report, out)

main()
'''
)
