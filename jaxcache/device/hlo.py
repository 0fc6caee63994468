"""HLO reading: which instructions of a compiled program make a copy of a pool.

A pool stays where it is only if every instruction that gives an array like it writes
into the memory of its operand. XLA says so in the program it prints: scatters and
dynamic-update-slices (also as the root of a fusion) work in place, since copy insertion
has put an explicit `copy` in front of every one that could not.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Iterator, Sequence

_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (.*)$")
_ARRAY = re.compile(r"\b([a-z]+\d*\w*)\[([\d,]*)\]")
_PARENTHESIS = re.compile(r"[()]")
_OPCODE = re.compile(r"^\s*([\w\-]+)\(")
_NAME = re.compile(r"%([\w.\-]+)")
_ALIAS = re.compile(r"\{[\d, ]*\}: \((\d+), \{[\d, ]*\}, (?:may|must)-alias\)")
_APPLIED = re.compile(r"(?:calls|to_apply)=%?([\w.\-]+)")

# Instructions that name memory and make none, and the two that write in place.
_NO_MEMORY = frozenset(
    (
        "after-all",
        "async-done",
        "async-start",
        "async-update",
        "bitcast",
        "call",
        "conditional",
        "dynamic-update-slice",
        "get-tuple-element",
        "opt-barrier",
        "parameter",
        "scatter",
        "tuple",
        "while",
    )
)
_IN_PLACE = frozenset(("dynamic-update-slice", "scatter"))
# Instructions that touch only chosen places of their first operand.
_PLACES = _IN_PLACE | {"dynamic-slice", "gather"}
# What is read whole is a copy from this part of a layer on: `x[1:]` is no less a copy.
PART = 4
# What is read at chosen places is a batch's, unless it is this large.
_BATCH_SIZE = 2**22


@dataclasses.dataclass(frozen=True)
class HloArray:
    """The type of an array in a program, as one device sees it.

    Attributes:
        dtype: XLA's name of the element type.
        dims: Its shape.
    """

    dtype: str
    dims: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.dims)


def hlo_dtype(dtype: str) -> str:
    """Returns XLA's name of a dtype: `bfloat16` is `bf16`, `int8` is `s8`."""
    if dtype == "bfloat16":
        return "bf16"
    name = re.sub(r"^float", "f", dtype)
    name = re.sub(r"^int", "s", re.sub(r"^uint", "u", name))
    return name.replace("_", "").replace("bool", "pred")


@dataclasses.dataclass(frozen=True)
class _Instruction:
    name: str
    opcode: str
    arrays: tuple[HloArray, ...]
    arguments: str
    attributes: str
    is_root: bool

    @property
    def operands(self) -> list[str]:
        return _NAME.findall(self.arguments)


_Computation = dict[str, _Instruction]


def _arrays(text: str) -> tuple[HloArray, ...]:
    return tuple(
        HloArray(dtype, tuple(int(d) for d in dims.split(",") if d))
        for dtype, dims in _ARRAY.findall(text)
    )


def _closing(text: str, start: int) -> int:
    """Returns the index of the parenthesis that closes the one at `start`."""
    depth = 0
    for match in _PARENTHESIS.finditer(text, start):
        depth += 1 if match[0] == "(" else -1
        if not depth:
            return match.start()
    return len(text)


def _parse(line: str) -> _Instruction | None:
    if not (match := _INSTRUCTION.match(line)):
        return None
    is_root, name, rest = match.groups()
    end = _closing(rest, 0) + 1 if rest.startswith("(") else rest.find(" ")
    shape, rest = rest[:end], rest[end:]
    if not (opcode := _OPCODE.match(rest)):
        return None
    close = _closing(rest, opcode.end() - 1)
    return _Instruction(
        name=name,
        opcode=opcode[1],
        arrays=_arrays(shape),
        arguments=rest[opcode.end() : close],
        attributes=rest[close + 1 :],
        is_root=is_root is not None,
    )


class Program:
    """An optimised HLO program, as far as memory is concerned.

    Args:
        text: What `compiled.as_text()` prints.
    """

    def __init__(self, text: str) -> None:
        self._header, _, self._body = text.partition("\n")

    @functools.cached_property
    def _computations(self) -> dict[str, _Computation]:
        """The computations, parsed when first asked for: a large model prints much."""
        computations: dict[str, _Computation] = {}
        current: _Computation = {}
        for line in self._body.splitlines():
            if opened := _COMPUTATION.match(line):
                current = computations.setdefault(opened[1], {})
            elif instruction := _parse(line):
                current[instruction.name] = instruction
        return computations

    def aliased(self) -> list[HloArray]:
        """Returns the parameters whose memory an output takes over."""
        layout = self._header.partition("entry_computation_layout={(")[2]
        parameters = _arrays(layout.partition(")->")[0])
        # A parameter list without arrays in tuples: JAX passes leaves one by one.
        return [parameters[int(number)] for number in _ALIAS.findall(self._header)]

    def copies(self, pool: HloArray, num_buffers: int) -> list[str]:
        """Returns the instructions that put a pool, or much of a layer, elsewhere.

        Much is a quarter of what is read whole, as by a slice or a loop over all slots,
        and three quarters of what is read at chosen places, if that is also large.

        Args:
            pool: The pool on one device.
            num_buffers: Its buffers.
        """
        return [
            f"{instruction.opcode} %{instruction.name}"
            for computation, instruction in self._executed()
            for index, array in enumerate(instruction.arrays)
            if array == pool
            or (
                PART * array.size * num_buffers >= pool.size
                and self._reads(
                    computation,
                    instruction,
                    pool,
                    places=4 * array.size * num_buffers >= 3 * pool.size
                    and array.size >= _BATCH_SIZE,
                )
            )
            if not self._writes_in_place(instruction, index)
        ]

    def _reads(
        self,
        computation: _Computation,
        instruction: _Instruction,
        pool: HloArray,
        *,
        places: bool,
    ) -> bool:
        """Says whether an instruction reads a pool, `places` of it or more."""
        for index, name in enumerate(instruction.operands):
            operand = computation.get(name)
            if operand is None:
                continue
            if _behind_bitcasts(computation, operand).arrays != (pool,):
                continue
            if places:
                return True
            if instruction.opcode != "fusion":
                if index or instruction.opcode not in _PLACES:
                    return True
            elif _spreads(self._fused(instruction), f"parameter({index})"):
                return True
        return False

    def _fused(self, instruction: _Instruction) -> _Computation:
        called = _APPLIED.search(instruction.attributes)
        return self._computations[called[1]] if called else {}

    def _executed(self) -> Iterator[tuple[_Computation, _Instruction]]:
        """Yields what is run on its own: not what is fused or applied per element."""
        inner = {
            name
            for computation in self._computations.values()
            for instruction in computation.values()
            if instruction.opcode not in ("call", "async-start")
            for name in _APPLIED.findall(instruction.attributes)
        }
        for name, computation in self._computations.items():
            if name not in inner:
                for instruction in computation.values():
                    if instruction.opcode not in _NO_MEMORY:
                        yield computation, instruction

    def _writes_in_place(self, instruction: _Instruction, index: int) -> bool:
        """Says whether result `index` of a fusion or kernel is one of its operands."""
        if instruction.opcode == "custom-call":
            return _kernel_aliases(instruction, index)
        if instruction.opcode != "fusion":
            return False
        fused = self._fused(instruction)
        root = next(i for i in fused.values() if i.is_root)
        if root.opcode == "tuple":
            root = fused[root.operands[index]]
        root = _behind_bitcasts(fused, root)
        if root.opcode not in _IN_PLACE:
            return False
        target = _behind_bitcasts(fused, fused[root.operands[0]])
        return target.opcode == "parameter"


def _behind_bitcasts(
    computation: _Computation, instruction: _Instruction
) -> _Instruction:
    while instruction.opcode == "bitcast":
        instruction = computation[instruction.operands[0]]
    return instruction


def _kernel_aliases(instruction: _Instruction, index: int) -> bool:
    aliasing = instruction.attributes.partition("output_to_operand_aliasing={")[2]
    output = "{}" if len(instruction.arrays) == 1 else f"{{{index}}}"
    return aliasing.startswith(f"{output}:") or f" {output}:" in aliasing


def _spreads(fused: _Computation, parameter: str) -> bool:
    """Says whether a fusion uses a parameter other than at chosen places of it."""
    names = {
        i.name for i in fused.values() if f"{i.opcode}({i.arguments})" == parameter
    }
    # Instructions stand behind their operands, so one pass follows the bitcasts.
    for instruction in fused.values():
        used = [i for i, name in enumerate(instruction.operands) if name in names]
        if used and instruction.opcode == "bitcast":
            names.add(instruction.name)
        elif used and (used != [0] or instruction.opcode not in _PLACES):
            return True
    return False


def pools_like(arrays: Sequence[HloArray], wanted: Sequence[HloArray]) -> list[bool]:
    """Returns for each wanted array whether one of `arrays`, each used once, is it."""
    left = list(arrays)
    found = []
    for array in wanted:
        found.append(array in left)
        if found[-1]:
            left.remove(array)
    return found
