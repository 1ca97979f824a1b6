"""Random stages, as source code: layers whose autograd Functions have random backwards, with plain layers next to them.

A backward need not be the gradient of its forward. Whatever it does, a pipeline has to give the gradients of 1F1B.
"""

import re
from typing import Any, NamedTuple

import hypothesis.strategies as st
from data import lines_of


def templates(heading: str) -> tuple[str, ...]:
    """The simplest comes first in each list, and failures shrink to it."""
    return tuple(lines_of("programs.txt", heading))


PRELUDE = "\n".join([*templates("prelude"), ""])
"""What all programs begin with."""

DECLARATION = "    weight_products = "
"""Begins the line of a layer that declares its Functions."""


LENGTH = 160
"""Number of choices, more than most programs take."""


class Program(NamedTuple):
    """A stage with at least one weight; `between(stage, step)` is what its user does after a step."""

    source: str
    dtype: str
    is_hidden: bool
    """Whether a backward writes in a way that torch does not count."""
    is_plain: bool
    """Whether all weight gradients can wait, as the page on the split says."""
    schedule: str

    @property
    def undeclared(self) -> str:
        return "\n".join(line for line in self.source.split("\n") if not line.startswith(DECLARATION))

    def __repr__(self) -> str:
        return f"{self.dtype}, hidden: {self.is_hidden}, plain: {self.is_plain}\n{self.source}"


PRODUCTS = {shape: templates(f"products of {shape}") for shape in "am"}
OTHERS, ALIASES = templates("others"), templates("aliases")
WRITES, HIDDEN_WRITES, READS = templates("writes"), templates("hidden writes"), templates("reads")
GUARDS, HOOKS, AROUND = templates("guards"), templates("hooks"), templates("around")
FORWARDS, FORWARDS_OF_VIEWS = templates("forwards"), templates("forwards of views")
NAMES_OF_VIEWS = templates("names of views")
WEIGHTS, LEAVES, MADE = templates("weights"), templates("leaves"), templates("made")
PLAIN, NEXT_TO_THEM = templates("plain"), templates("next to them")
PARAMETERS = {
    "w": "WIDTH, WIDTH",
    "v": "WIDTH, WIDTH",
    "stack": "2, WIDTH, WIDTH",
    "tall": "2 * WIDTH, WIDTH",
    "flat": "WIDTH * WIDTH",
    "g": "WIDTH",
    "b": "WIDTH",
    "pos": "ROWS, WIDTH",
}


class _Writer:
    """Writes a program, line by line."""

    def __init__(self, choices: bytes, is_plain: bool) -> None:
        self._choices = choices
        self.place = 0
        """Number of choices made."""
        self.is_plain = is_plain
        self.is_hidden = False
        self.functions: list[str] = []
        self.has_autocast = False
        self.with_workspace: set[str] = set()
        self.sites = 0
        """Number of calls of Functions. Each has workspaces of its own, as an engine would sum up what it returns."""

    def number(self, least: int, most: int) -> int:
        choice = self._choices[self.place] if self.place < len(self._choices) else 0
        self.place += 1
        return least + choice % (most - least + 1)

    def pick(self, options: Any) -> Any:
        return options[self.number(0, len(options) - 1)]

    def one_in(self, times: int) -> bool:
        return self.number(1, times) == times

    def stage(self) -> str:
        number = self.number(1, 3)
        layers = [self.layer(place) for place in range(number)]
        lines = ["class Stage(nn.Module):", "    def __init__(self):", "        super().__init__()"]
        lines += [f"        self.l{place} = L{place}()" for place in range(number)]
        lines.append(
            "        self.last = nn.Parameter(torch.randn(WIDTH))  # has a gradient even if all others are frozen"
        )
        lines += ["", "    def forward(self, x):"]
        indent = "        "
        if self.has_autocast:
            lines.append(f'{indent}with torch.autocast("cpu", torch.bfloat16):')
            indent += "    "
        for place in range(number):
            call = self.pick(AROUND) if not self.is_plain and self.one_in(3) else AROUND[0]
            lines.append(f"{indent}x = " + call.format(call=f"self.l{place}(x)", run=f"self.l{place}", x="x"))
        lines.append(f"{indent}return x{'.float()' if self.has_autocast else ''} + self.last")
        return "\n".join([*self.functions, *layers, *lines, "", "", *self.between(number), ""])

    def between(self, layers: int) -> list[str]:
        step = self.pick(("zero_grad()", "zero_grad(set_to_none=False)", "train()"))
        lines = ["def between(stage, step):", f"    stage.{step}"]
        if not self.is_plain and self.one_in(3):
            whom, what = self.number(0, layers - 1), self.pick(("requires_grad_(False)", "eval()", "requires_grad_()"))
            lines += [f"    if step == {self.number(0, 1)}:", f"        stage.l{whom}.{what}"]
        if self.one_in(2):
            lines += [
                "    with torch.no_grad():",
                "        for each in stage.parameters():",
                "            each.add_(0.01)" if self.one_in(2) else "            each.mul_(0.9)",
            ]
        return lines

    def layer(self, place: int) -> str:
        functions: set[str] = set()
        lines, hooks = [], []
        name = "x"
        for _ in range(self.number(1, 3)):
            made = self.operation(name, functions)
            lines += [made] if isinstance(made, str) else made
            name = "y"
            if not self.is_plain and self.one_in(8):
                hook = self.pick(HOOKS).format(t="y")
                lines += ["if y.requires_grad:", f"    {hook}"]
        used = set(re.findall(r"self\.(\w+)", "\n".join(lines)))
        if not self.is_plain and self.one_in(8) and (owned := sorted(used & PARAMETERS.keys())):
            parameter = f"self.{self.pick(owned)}"
            after = "{t}.register_post_accumulate_grad_hook(halve)"
            hooks.append(self.pick((*HOOKS, after)).format(t=parameter))
        made_of = [
            f"self.{each} = nn.Parameter(torch.randn({PARAMETERS[each]}) / 2)"
            for each in sorted(used & PARAMETERS.keys())
        ]
        if "linear" in used:
            made_of.append("self.linear = nn.Linear(WIDTH, WIDTH)")
        declared = ", ".join(f"{each}.apply: FROM_BACKWARD" for each in sorted(functions))
        return "\n".join(
            [
                f"class L{place}(nn.Module):",
                *([f"{DECLARATION}{{{declared}}}", ""] if declared else []),
                "    def __init__(self):",
                "        super().__init__()",
                *(f"        {each}" for each in [*made_of, *hooks]),
                "",
                "    def forward(self, x):",
                *(f"        {each}" for each in lines),
                "        return y",
                "",
                "",
            ]
        )

    def operation(self, x: str, functions: set[str]) -> str | list[str]:
        if self.is_plain:
            return f"y = {self.pick(PLAIN).format(x=x, w=self.pick(WEIGHTS))}"
        kind = self.pick(("function", "plain", "next", "function", "two calls", "frozen", "tied"))
        if kind == "frozen":
            what = self.pick(("self.linear.bias", "self.linear.weight", "self.w"))
            calls = [self.call(each, functions, ("linear", "w")) for each in (x, "y")]
            return [f"{what}.requires_grad_(False)", f"y = {calls[0]}", f"{what}.requires_grad_()", f"y = {calls[1]}"]
        if kind == "next":
            call = self.pick(NEXT_TO_THEM).format(x=x)
        elif kind == "plain":
            call = self.pick(PLAIN).format(x=x, w=self.weight(functions))
        elif kind == "tied":
            call = f"F.linear({self.call_function(x, 'self.w', functions)}, self.w)"
        elif kind == "two calls":
            inner = self.call_function(x, self.weight(functions), functions)
            call = self.call_function(f"torch.tanh({inner})", self.weight(functions), functions)
        else:
            call = self.call_function(x, self.weight(functions), functions)
        around = self.pick(AROUND) if self.one_in(4) else AROUND[0]
        return "y = " + around.format(call=call, run=f"lambda {x}: {call}", x=x)

    def call(self, x: str, functions: set[str], kinds: tuple[str, ...]) -> str:
        if self.one_in(2):
            return self.call_function(x, self.pick(("self.w", "self.linear.weight")), functions)
        return self.pick(("self.linear({x})", "F.linear({x}, self.w)", "{x} @ self.w")).format(x=x)

    def weight(self, functions: set[str]) -> str:
        how = self.number(0, 5)
        if how < 4:
            return self.pick(WEIGHTS)
        if how == 4:
            return self.pick(MADE)
        name = self.function_of_a_weight()
        functions.add(name)
        self.sites += 1
        return f"{name}.apply({self.pick(WEIGHTS)}, {self.sites})"

    def call_function(self, x: str, weight: str, functions: set[str]) -> str:
        known = sorted(each for each in functions if each.startswith("F"))
        name = self.pick(known) if known and self.one_in(2) else self.function()
        functions.add(name)
        self.sites += 1
        if name in self.with_workspace and weight not in LEAVES:  # `.grad` would become a view of the workspace
            weight = LEAVES[0]
        return f"{name}.apply({x}, {weight}, [{weight}], {self.sites}, self.training)"

    def function(self) -> str:
        """Writes an autograd Function of x and a weight; returns its name."""
        name = f"F{len(self.functions)}"
        known = {"a": ["x", "dy"], "m": ["w"]}
        body: list[str] = []
        for place in range(self.number(0, 4)):
            body += self.statement(name, f"t{place}", known)
        returned = self.returned(known)
        forward = [
            "def forward(ctx, x, w, owner, site, training):",
            "    ctx.save_for_backward(x, w)",
            "    ctx.owner, ctx.site, ctx.training = owner[0], site, training",
            f"    return {self.pick(FORWARDS)}",
        ]
        if "workspace" in "".join([*body, *returned]):
            self.with_workspace.add(name)
        backward = [
            "def backward(ctx, dy):",
            "    x, w = ctx.saved_tensors",
            *(f"    {each}" for each in [*body, *returned]),
        ]
        self.functions.append(_function(name, forward, backward, self.has_autocast))
        return name

    def function_of_a_weight(self) -> str:
        name = f"{self.pick(NAMES_OF_VIEWS)}_{len(self.functions)}"
        known = {"a": [], "m": ["dy"]}
        body: list[str] = []
        for place in range(self.number(0, 2)):
            body += self.statement(name, f"t{place}", known)
        forward = ["def forward(ctx, w, site):", "    ctx.site = site", f"    return {self.pick(FORWARDS_OF_VIEWS)}"]
        last = self.pick(("dy * 0.1", "{m}", "{m}.t()", "{m} @ {n}")).format(m=known["m"][-1], n=self.pick(known["m"]))
        backward = ["def backward(ctx, dy):", *(f"    {each}" for each in [*body, f"return {last}, None"])]
        self.functions.append(_function(name, forward, backward, self.has_autocast))
        return name

    def statement(self, function: str, new: str, known: dict[str, list[str]]) -> list[str]:
        """Lines of a backward, which may make a new variable."""
        kinds = ("product", "other", "write", "product", "write", "read", "hidden", "again", "branch")
        kind = self.pick(kinds)
        has_rows = bool(known["a"])
        shape = self.pick(("m", "a")) if has_rows else "m"
        if kind in ("write", "hidden") and known[shape] == ["w"]:
            shape = "a"
        if kind == "write":
            return self.guarded(self.fill(self.pick(WRITES), shape, known), function, known)
        if kind == "hidden":
            self.is_hidden = True
            return self.guarded(self.fill(self.pick(HIDDEN_WRITES), shape, known), function, known)
        if kind == "read":
            return self.guarded(self.fill(self.pick(READS), shape, known), function, known)
        if kind == "again" and has_rows:
            return self.differentiated(new, known)
        if kind == "branch" and has_rows:
            one, other = (self.expression(shape, known) for _ in range(2))
            lines = [f"{new} = {one}", *self.guarded(f"{new} = {other}", function, known, always=True)]
        else:
            is_product = kind == "product" and has_rows
            lines = [
                f"{new} = {self.expression(shape, known) if is_product else self.fill(self.pick(OTHERS), shape, known)}"
            ]
        known[shape].append(new)
        return lines

    def expression(self, shape: str, known: dict[str, list[str]]) -> str:
        return self.fill(self.pick(PRODUCTS[shape]), shape, known)

    def fill(self, template: str, shape: str, known: dict[str, list[str]]) -> str:
        """The template with variables; weights are read, never written to."""
        names = {}
        for letter in sorted(set(re.findall(r"{(\w)}", template))):
            options = known[{"a": "a", "b": "a", "c": "a", "m": "m", "n": "m"}.get(letter, shape)]
            if letter == "v" and template in WRITES + HIDDEN_WRITES:
                options = [each for each in options if each != "w"]
            if letter == "v" and template in ALIASES:  # which the engine may add to
                options = [each for each in options if each != "w"] or ["(w * 0.5)"]
            names[letter] = self.pick(options[::-1] if letter in "avm" else options)
        return template.format(**names)

    def guarded(self, line: str, function: str, known: dict[str, list[str]], always: bool = False) -> list[str]:
        if not (always or self.one_in(3)) or not known["a"]:
            return [line]
        guard = self.pick(GUARDS).format(a=self.pick(known["a"]), function=function)
        return [f"if {guard}:", f"    {line}"]

    def differentiated(self, new: str, known: dict[str, list[str]]) -> list[str]:
        a, b, m = (self.pick(known[each]) for each in ("a", "a", "m"))
        into_weight = self.one_in(3)
        product = self.pick(("F.linear(i, {w})", "i @ {w}", "torch.tanh(i.mm({w}))"))
        lines = [
            "with torch.enable_grad():",
            f"    i = {a}.detach().requires_grad_()",
            *([] if into_weight else [f"    j = {m}.detach().requires_grad_()"]),
            f"    o = {product.format(w='ctx.owner' if into_weight else 'j')}",
        ]
        known["a"].append(new)
        if into_weight:
            return [*lines, f"o.backward({b})", f"{new} = i.grad"]
        known["m"].append(f"{new}m")
        return [*lines, f"{new}, {new}m = torch.autograd.grad(o, (i, j), {b})"]

    def returned(self, known: dict[str, list[str]]) -> list[str]:
        dx = self.pick((*known["a"][::-1], "dy.mm(w)", "dy @ w"))
        how = self.pick(
            (
                "direct",
                "last",
                "needed",
                "larger",
                "none",
                "accumulate",
                "alias",
                "transposed",
                "direct",
                "direct",
                "direct",
            )
        )
        m = known["m"][-1]
        if how == "direct" or (m == "w" and how in ("last", "alias", "transposed")):
            return [
                f"dw = {self.expression('m', known)}",
                *self.late_write(known),
                f"return {dx}, dw, None, None, None",
            ]
        if how == "needed":
            condition = "if ctx.needs_input_grad[1] else None"
            return [f"dw = {self.expression('m', known)} {condition}", f"return {dx}, dw, None, None, None"]
        if how == "larger":
            return [f"return {dx}, ({self.expression('m', known)}).expand(2, -1, -1), None, None, None"]
        if how == "none":
            return [f"return {dx}, None, None, None, None"]
        if how == "accumulate":
            owner = self.pick(("ctx.owner", "w"))
            product, add = "dy.t().mm(x)", self.pick((".addmm_(dy.t(), x)", ".add_({p})", ".data.add_({p})", " += {p}"))
            if "{p}" in add:
                product = self.expression("m", known)
            return [
                f"if {owner}.grad is None or not ctx.needs_input_grad[1]:",
                f"    return {dx}, {product}, None, None, None",
                f"dx = {dx}",
                f"{owner}.grad{add.format(p=product)}",
                "return dx, None, None, None, None",
            ]
        if how != "last":  # of memory that it alone holds: the engine may add to it
            m = f"{m}.clone()"
        last = {"last": m, "alias": f"{m}.view(-1).view_as(w)", "transposed": f"{m}.t()"}[how]
        return [f"return {dx}, {last}, None, None, None"]

    def late_write(self, known: dict[str, list[str]]) -> list[str]:
        if not self.one_in(3):
            return []
        shape = self.pick(("a", "m"))
        more = {"a": known["a"], "m": [*known["m"], "dw"]}
        return self.guarded(self.fill(self.pick(WRITES), shape, more), "F", more)


def _function(name: str, forward: list[str], backward: list[str], has_autocast: bool) -> str:
    casts = '    @torch.amp.custom_{}(device_type="cpu"{})'
    lines = [f"class {name}(torch.autograd.Function):"]
    for method, cast in ((forward, ("fwd", ", cast_inputs=torch.bfloat16")), (backward, ("bwd", ""))):
        lines += ["    @staticmethod", *([casts.format(*cast)] if has_autocast else [])]
        lines += [*(f"    {each}" for each in method), ""]
    return "\n".join([*lines, ""])


def write(choices: bytes, is_plain: bool = False) -> Program:
    """The program of these choices, 0 for those after the last one; plain if all of its weight gradients can wait."""
    writer = _Writer(choices, is_plain)
    writer.has_autocast = not is_plain and writer.one_in(8)
    schedule = writer.pick(("WeightsLast", "ZBH1"))
    source = writer.stage()
    dtype = "float32" if writer.has_autocast else "float64"
    return Program(f"{PRELUDE}\n\n{source}", dtype, writer.is_hidden, is_plain, schedule)


choices = st.binary(min_size=LENGTH, max_size=LENGTH)
"""In one piece, because each draw of its own takes hypothesis longer than the line that it writes."""
