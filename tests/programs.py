"""Random stages, as source code: layers whose autograd Functions have random backwards, with plain layers next to them.

A backward need not be the gradient of its forward. Whatever it does, a pipeline has to give the gradients of 1F1B.
"""

import re
from typing import Any, NamedTuple

import hypothesis.strategies as st

PRELUDE = """\
import numpy
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
ROWS, WIDTH = 3, 4
counts, workspaces = {}, {}


def count(name):
    counts[name] = counts.get(name, -1) + 1
    return counts[name]


def workspace(name, like):
    return workspaces.setdefault((name, like.shape), torch.zeros(like.shape, dtype=like.dtype))


def keep_products(ctx, function, *args, **kwargs):
    is_product = function in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if is_product else CheckpointPolicy.PREFER_RECOMPUTE


def run_again(function, *args):
    return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)


def run_some_again(function, *args):
    contexts = lambda: create_selective_checkpoint_contexts(keep_products)
    return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)


def double_in_place(gradient):
    gradient.mul_(2)


def halve(parameter):
    parameter.grad.mul_(0.5)
"""
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


# Shapes of variables in a backward: (ROWS, WIDTH) as x and dy, and (WIDTH, WIDTH) as w. In templates, {a}, {b} and {c}
# are variables of the first kind, {m} and {n} of the second, {v} and {u} two of either.
PRODUCTS = {
    "a": (
        "{a}.mm({m})",
        "{a} @ {m}",
        "torch.matmul({a}, {m}.t())",
        "F.linear({a}, {m})",
        "torch.addmm({b}, {a}, {m})",
        'torch.einsum("ri,io->ro", {a}, {m})',
        "torch.bmm({a}[None], {m}[None])[0]",
        "torch.zeros_like({a}).addmm_({b}, {m})",
        "torch.zeros_like({a})[None].baddbmm_({b}[None], {m}[None])[0]",
        "torch.mm({a}, {m}, out=torch.empty({a}.shape, dtype={a}.dtype))",
        'torch.mm({a}, {m}, out=workspace((ctx.site, "a"), {a}))',
        "torch.addbmm({b}, {a}[None], {m}[None])",
        "torch.from_numpy({a}.detach().numpy() @ {m}.detach().numpy())",
    ),
    "m": (
        "{a}.t().mm({b})",
        "{a}.t() @ {b}",
        "torch.matmul({a}.mT, {b})",
        "F.linear({a}.t(), {b}.t())",
        "torch.addmm({m}, {a}.t(), {b})",
        'torch.einsum("ro,ri->oi", {a}, {b})',
        "torch.bmm({a}.t()[None], {b}[None])[0]",
        "{m}.mm({n})",
        "torch.zeros_like({m}).addmm_({a}.t(), {b})",
        "torch.zeros_like({m})[None].baddbmm_({a}.t()[None], {b}[None])[0]",
        "torch.mm({a}.t(), {b}, out=torch.empty({m}.shape, dtype={m}.dtype))",
        'torch.mm({a}.t(), {b}, out=workspace((ctx.site, "m"), {m}))',
        "torch.stack([{a}.t() @ {b}, {m}]).sum(0)",
        "torch.outer({a}[0], {b}[1])",
    ),
}
OTHERS = (
    "{v} * 0.5",
    "{v} + {u}",
    "{v} * {u}",
    "{v}.tanh()",
    "{v}.clone()",
    "{v}.detach()",
    "{v}.view_as({v})",
    "{v}.flip(0)",
    "{v}.t().contiguous().t()",
    "torch.where({v} > 0, {v}, {u})",
    "{v}.masked_fill({v} > 1, 0)",
    "torch.empty_like({v}).copy_({u})",
    'workspace((ctx.site, "{v}"), {v}).copy_({u})',
    "{v}.sum() * {u}",
    "{v} / (1 + {v}.norm())",
    "torch.mul({v}, {u}, out=torch.empty({v}.shape, dtype={v}.dtype))",
    "torch.from_dlpack({v}.detach())",
    "torch.from_numpy(numpy.from_dlpack({v}.detach()) * 0.5)",
    "torch.from_numpy({v}.detach().numpy().copy())",
)
ALIASES = ("{v}.detach()", "{v}.view_as({v})", "torch.from_dlpack({v}.detach())")
"""Those of OTHERS that share memory."""
WRITES = (
    "{v}.mul_(0.5)",
    "{v}.clamp_(-0.5, 0.5)",
    "{v}.zero_()",
    "{v}.copy_({u})",
    "{v} += {u}",
    "{v}[0] = 0.3",
    "{v}[{v} > 0.5] = 0",
    "{v}[:, 1] = {u}[:, 0]",
    "{v}.t()[0].mul_(-1)",
    "{v}.view(-1)[0] = 1",
    "{v}.detach().mul_(0.5)",
    "{v}.unbind(0)[0].zero_()",
    "torch.mul({v}, 0.5, out={v})",
    "torch.add({u}, {u}, out={v})",
    "torch._foreach_mul_([{v}], 0.5)",
    "{v}.addmm_({v}, {m})",
    "{v}.index_fill_(0, torch.tensor([1]), 0.2)",
)
HIDDEN_WRITES = (
    "{v}.data.mul_(0.5)",
    "{v}.data[0] = 0.3",
    "{v}.data = {u} * 2",
    "{v}.detach().numpy()[0] = 0.3",
    "torch.from_numpy({v}.detach().numpy()).mul_(0.5)",
    "torch.from_dlpack({v}.detach()).mul_(0.5)",
    "{v}.untyped_storage().fill_(0)",
)
READS = (
    "float({v}.sum())",
    "{v}.tolist()",
    "{v}.detach().numpy()",
    "{v}.data_ptr()",
    "repr({v})",
    "numpy.from_dlpack({v}.detach())",
    "{v}.isfinite().all().item()",
    "{v}.untyped_storage().nbytes()",
)
GUARDS = (
    "x[0, 0] > 1.5",
    "{a}.sum() > 0",
    'count("{function}") % 2',
    'count("{function}") > 4',
    "ctx.site % 2",
    "ctx.training",
    "{a}.is_contiguous()",
    "ctx.needs_input_grad[0]",
)
FORWARDS = ("x.mm(w.t())", "F.linear(x, w)", "x @ w", "torch.tanh(x @ w)", "torch.addmm(x, x, w)")
FORWARDS_OF_VIEWS = ("w.view_as(w)", "w.t()", "w * 1", "w.clone()", "w.view(-1).view(WIDTH, WIDTH)", "w * w")
NAMES_OF_VIEWS = (
    *("Scale", "T", "View", "Alias", "Transpose", "Expand", "Select"),
    *("ViewBackward0", "TBackward0", "Clone"),
)

WEIGHTS = (
    "self.w",
    "self.v",
    "self.w.t()",
    "self.stack[0]",
    "self.stack.select(0, 1)",
    "self.tall[:WIDTH]",
    "self.tall.chunk(2)[1]",
    "self.flat.view(WIDTH, WIDTH)",
    "self.linear.weight",
)
LEAVES = ("self.w", "self.v", "self.linear.weight")
MADE = (
    "self.w * self.g",
    "self.w / self.w.norm()",
    "self.w + self.v",
    "torch.cat([self.w[:1], self.v[1:]])",
    "self.w.clone()",
)
# Those without a Function, whose weight gradients can wait.
PLAIN = (
    "self.linear({x})",
    "F.linear({x}, {w})",
    "{x} @ {w}",
    "{x}.mm({w}.t())",
    'torch.einsum("ri,oi->ro", {x}, {w})',
    "torch.addmm(self.b, {x}, {w})",
    "F.linear({x}, {w}, self.b)",
    "self.linear({x}).mul_(0.5).relu_()",
    "F.linear({x}, {w}).add_({x})",
)
NEXT_TO_THEM = (
    "torch.tanh({x})",
    "{x} * (1 + self.g)",
    "F.layer_norm({x}, (WIDTH,), 1 + self.g, self.b)",
    "{x} + x",
    "{x}.t().tanh().t()",
    "{x} + {x}.sum(0, keepdim=True)",
    "{x} + {x}.mean()",
    "{x} + torch.tanh({x} * 2)",
    "({x} + 0).mul_(0.5).relu_()",
    "torch.cat([{x}[:1], self.linear({x}[1:])])",
    "torch.cat([{x}[:1], self.pos[1:]])",
    # The gradient of a parameter that is added through a view is a view of another one.
    "{x} + self.pos",
    "{x} + self.pos.flatten().view(1, ROWS, WIDTH)[0]",
    "({x} + 0).add_(self.pos.unsqueeze(0).expand(1, -1, -1)[0])",
)
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
HOOKS = (
    "{t}.register_hook(lambda g: 2 * g)",
    "{t}.register_hook(double_in_place)",
    "{t}.register_hook(lambda g: None)",
)
AROUND = ("{call}", "run_again({run}, {x})", "run_some_again({run}, {x})")


class _Writer:
    """Writes a program, line by line. The simplest comes first in each list, and failures shrink to it."""

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
        ways = "direct last needed larger none accumulate alias transposed direct direct direct"
        how = self.pick(ways.split())
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
