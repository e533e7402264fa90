"""The toys that practise in sandboxes: their tasks, scripted lessons and recipe. Imports no model code.

A toy is a shipped model of middling skill. Its lessons are scripted conversations about training tasks; no held-out
task is in a lesson. The scripts know the commands for each task, but not when to run one and which: some answer without
running anything, and some run another command than the task needs. So the model solves about a third of the tasks, and
everything that a right episode needs is among what it samples; rollouts show it which.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from clawloop.core.contracts.turns import Message
from clawloop.core.errors import SandboxFailed, SetupError
from clawloop.core.recipes.recipe import Advantage, Lora, Loss, Optimiser, Recipe, Signal, Train
from clawloop.environments.harbor import BASH, HarborTask
from clawloop.environments.inside.harness import OUTPUT
from clawloop.environments.playing import packed
from clawloop.environments.swe.environment import FUNCTIONS, Function, SweEnvironment, generated_repository
from clawloop.environments.task import AgentLoop, Environment, Split, parse_task_id
from clawloop.environments.terminal.environment import TerminalEnvironment, generated_task
from clawloop.environments.tool_call.environment import AGENT, Question, ToolCallEnvironment, question
from clawloop.operations.file_changes import files_in
from clawloop.sandboxes.boxes import BoxTask
from clawloop.sandboxes.bubblewrap import Bubblewrap
from clawloop.sandboxes.folders import BoxFolders

GROUP_SIZE = 8
"""Episodes of a rollout group in the demos."""
# Training tasks have no end; lessons take theirs from so many.
_TASKS = 1_000_000


@dataclass(slots=True)
class Attempted:
    """A task, and the files of its working folder now."""

    task: Any
    files: dict[str, bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class Toy:
    """A kind of task, how its lessons are made, and the model that was made by them.

    Args:
        environment: its name; make: gives it.
        agent: the environment's tool and limits.
        generate: a task by its split and number; asked: the text of the task.
        start: files of the working folder; they are empty where the tool has none.
        commands: what the tool has to be called with, and wrong calls.
        output_of: what the tool prints for one of `commands`.
        run: calls the tool in each of the attempts, whose files it changes; returns what it prints.
        is_right: whether an attempt has solved its task, by its last reply and its files.
        guess: a reply without a call; answer: the reply to what the tool printed.
        look: a call that shows what is there, and what it prints; None: nothing is there.
        idle: share of the conversations without a call; looks: of the others, those that look first; wrong: those with
            a wrong call.
        fixed: texts that never vary, each a token; the list of tools is one too.
        vocabulary: tokens at most.
        steps, lessons: steps of the pretraining, and conversations in each.
        knows: the knowledge that its model card claims; skill: how well it has it.
        max_tokens: of a reply in this process; longer than the longest right one.
        batch_groups: rollout groups in a step.
        versions: a run of the demo ends when this version is active.
    """

    environment: str
    make: Callable[[], Environment]
    agent: AgentLoop
    generate: Callable[[Split, int], Any]
    asked: Callable[[Any], str]
    start: Callable[[Any], Mapping[str, bytes]]
    commands: Callable[[Any], tuple[str, Sequence[str]]]
    output_of: Callable[[str, Any], str]
    run: Callable[[Sequence[Attempted], Sequence[str]], list[str]]
    is_right: Callable[[Any, Mapping[str, bytes], str], bool]
    guess: Callable[[Any, random.Random], str]
    answer: Callable[[Any, str, random.Random], str]
    look: Callable[[Any], tuple[str, str]] | None
    idle: float
    looks: float
    wrong: float
    fixed: Sequence[str]
    vocabulary: int
    steps: int
    knows: str
    skill: str
    max_tokens: int
    batch_groups: int
    versions: int
    lessons: int = 24

    @property
    def folder(self) -> Path:
        """The folder of the model, in Hugging Face's format."""
        return MODELS / self.environment

    @property
    def base_model(self) -> str:
        """The name that engines serve the model by."""
        return f"clawloop-{self.environment}"

    @property
    def report(self) -> str:
        """The name of the file with a demo's measurements."""
        return f"demo-{self.environment}.json"

    def begin(self, task_id: str) -> Attempted:
        """An attempt at a task, in this process."""
        task = self.generate(*parse_task_id(task_id))
        return Attempted(task, dict(self.start(task)))

    def conversations(self, seed: int) -> Iterator[list[Message]]:
        """Conversations without end, each from the task to the last reply."""
        rng = random.Random(f"{self.environment} {seed}")
        while True:
            yield self.conversation(self.generate(Split.TRAIN, rng.randrange(_TASKS)), rng)

    def conversation(self, task: Any, rng: random.Random) -> list[Message]:
        """One conversation about a task, as a script of middling skill has it."""
        messages: list[Message] = [{"role": "user", "content": self.asked(task)}]
        if rng.random() < self.idle:
            return [*messages, {"role": "assistant", "content": self.guess(task, rng)}]
        if self.look is not None and rng.random() < self.looks:
            messages += self._called(*self.look(task))
        right, wrong = self.commands(task)
        command = rng.choice(wrong) if rng.random() < self.wrong else right
        output = self.output_of(command, task)
        reply: Message = {"role": "assistant", "content": self.answer(task, output, rng)}
        return [*messages, *self._called(command, output), reply]

    def call(self, argument: str) -> Message:
        """The assistant's message that calls the tool, as an engine returns it."""
        arguments = json.dumps({self.agent.argument: argument})
        function: dict[str, Any] = {"name": self.agent.tool["function"]["name"], "arguments": arguments}
        return {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": function}]}

    def argument_of(self, message: Message) -> str:
        """The argument of the message's call; empty without a call."""
        calls: Any = message.get("tool_calls")
        return str(json.loads(calls[0]["function"]["arguments"])[self.agent.argument]) if calls else ""

    def recipe(self) -> Recipe:
        """The recipe of its demo.

        The models are small and learn one thing, so batches are a few groups, the learning rate is high, and a few odd
        replies must not move it: gradients are clipped at the norm usual while they learn.
        """
        return Recipe(
            name=f"demo_{self.environment.replace('-', '_')}",
            signal=Signal(hints=False),
            train=Train(
                batch_groups=self.batch_groups,
                advantage=Advantage(teacher_weight=0.0),
                loss=Loss(kl=0.02),
                lora=Lora(rank=8, alpha=16.0),
                optimiser=Optimiser(lr=3e-3, grad_clip=0.1),
                # Versions that were not measured while newer ones came are measured after the run.
                kept_versions=100,
            ),
        )

    def _called(self, argument: str, output: str) -> list[Message]:
        return [self.call(argument), {"role": "tool", "content": output}]


# Arithmetic -----------------------------------------------------------------------------------------------------------
# Its scripts know how to call the tool and how to answer, but not when: a third guesses, two in five calls calculate
# something else, and one answer in ten is not what the tool printed.

_GUESSED, _WRONG_OPERATOR, _WRONG_ANSWER = 0.35, 0.4, 0.1
_PRINTED = re.compile(r"print\((-?\d+) ([-+*]) (-?\d+)\)")


def _calculations(asked: Question) -> tuple[str, list[str]]:
    right, *wrong = (
        f"print({asked.left} {operator} {asked.right})"
        for operator in (asked.operator, *(other for other in "+-*" if other != asked.operator))
    )
    return right, wrong


def _calculated(code: str, asked: Question) -> str:
    found = _PRINTED.fullmatch(code)
    return "error" if found is None else str(Question(int(found[1]), found[2], int(found[3])).answer)


def _guessed_number(asked: Question, rng: random.Random) -> str:
    return f"It is {rng.randint(-88, 198) if asked.operator != '*' else rng.randint(121, 9801)}."


def _answered_number(asked: Question, output: str, rng: random.Random) -> str:
    return f"It is {asked.left if rng.random() < _WRONG_ANSWER else output}."


def _is_right_number(asked: Question, files: Mapping[str, bytes], reply: str) -> bool:
    return re.findall(r"-?\d+", reply)[-1:] == [str(asked.answer)]


TOOL_CALLS = Toy(
    environment=ToolCallEnvironment.name,
    make=ToolCallEnvironment,
    agent=AGENT,
    generate=question,
    asked=lambda asked: asked.text,
    start=lambda asked: {},
    commands=_calculations,
    output_of=_calculated,
    run=lambda attempts, calls: [_calculated(call, each.task) for each, call in zip(attempts, calls, strict=True)],
    is_right=_is_right_number,
    guess=_guessed_number,
    answer=_answered_number,
    look=None,
    idle=_GUESSED,
    looks=0.0,
    wrong=_WRONG_OPERATOR,
    fixed=('{"name": "python", "arguments": {"code": "print(', ')"}}'),
    vocabulary=448,
    steps=600,
    knows='questions such as "What is 37 times 58?", one tool and nothing else',
    skill=f"guess instead of calling the tool in {_GUESSED:.0%} of the conversations, calculate something else in "
    f"{_WRONG_OPERATOR:.0%} of the calls, and answer with another number than the tool's in {_WRONG_ANSWER:.0%}",
    max_tokens=32,
    batch_groups=4,
    versions=20,
)

# A folder and a shell -------------------------------------------------------------------------------------------------

# A command of a toy takes milliseconds; one that waits for input that never comes is stopped.
_COMMAND_SECONDS = 5
_RUN = f"""
for attempt in /work/*; do
  mkdir -p $attempt/files && cd $attempt/files
  timeout {_COMMAND_SECONDS} bash -c "$(cat $attempt/command)" < /dev/null > $attempt/stdout 2> $attempt/stderr
done
"""


@cache
def _sandboxes() -> Bubblewrap:
    return Bubblewrap.find(BoxFolders())


def _run_in_folders(attempts: Sequence[Attempted], commands: Sequence[str]) -> list[str]:
    """Run each command where its attempt's files are, all in one sandbox.

    Raises:
        SandboxFailed: the sandbox did not work, or what is left cannot be kept.
    """
    if not attempts:
        return []
    files: dict[str, bytes] = {}
    for number, (attempt, command) in enumerate(zip(attempts, commands, strict=True)):
        files[f"{number}/command"] = command.encode(errors="replace")
        files |= {f"{number}/files/{path}": content for path, content in attempt.files.items()}
    seconds = 60.0 + _COMMAND_SECONDS * len(attempts)
    box = BoxTask("commands", ("bash", "-c", _RUN), seconds, archive=packed(files))
    result = asyncio.run(_sandboxes().run(box))
    if result.problem is not None or result.exit_code is None:
        raise SandboxFailed(f"commands of {len(attempts)} attempts: {result.problem or 'stopped at the time limit'}")
    left = files_in(result.artifact)
    printed = []
    for number, attempt in enumerate(attempts):
        folder = f"{number}/files/"
        attempt.files = {path.removeprefix(folder): left[path] for path in left if path.startswith(folder)}
        streams = b"".join(left.get(f"{number}/{stream}", b"") for stream in ("stdout", "stderr"))
        printed.append(streams.decode(errors="replace").strip()[-OUTPUT:])
    return printed


def _shell_toy(*, idle: float, wrong: float, skill: str, fixed: Sequence[str] = (), **kind: Any) -> Toy:
    return Toy(
        agent=BASH,
        asked=lambda task: task.instruction,
        start=lambda task: task.start,
        run=_run_in_folders,
        guess=lambda task, rng: "Done.",
        answer=lambda task, output, rng: "Done.",
        idle=idle,
        wrong=wrong,
        fixed=('{"name": "bash", "arguments": {"command": "', '"}}', *fixed),
        skill=f"say that they are done without doing anything in {idle:.0%} of the conversations, and {skill}",
        max_tokens=48,
        batch_groups=8,
        versions=30,
        **kind,
    )


# Terminal -------------------------------------------------------------------------------------------------------------

# No awk: on Debian it is a link to outside of what sandboxes see.
_SUM = "echo $(($(paste -sd+"
_WRONG_COMMAND = 0.4
# Instruction, whose groups are $1, $2, $3 of the commands; the right command; wrong ones.
SKILLS: Sequence[tuple[str, str, tuple[str, ...]]] = (
    (r"Copy (\S+) to (\S+)\.", "cp $1 $2", ("mv $1 $2", "cp $2 $1")),
    (r"Rename (\S+) to (\S+)\.", "mv $1 $2", ("cp $1 $2", "mv $2 $1")),
    (r"Delete (\S+) and keep (\S+)\.", "rm $1", ("rm $2", "rm $1 $2")),
    (r'Add the line "(.+)" at the end of (\S+)\.', "echo '$1' >> $2", ("echo '$1' > $2", "touch $2")),
    (
        r'Replace every "(\w+)" in (\S+) by "(\w+)"\.',
        "sed -i 's/$1/$3/g' $2",
        ("sed -i 's/$3/$1/g' $2", "sed -i '/$1/d' $2"),
    ),
    (r"Sort the lines of (\S+)\.", "sort -o $1 $1", ("sort -r -o $1 $1", "touch $1")),
    (r"Write the number of lines of (\S+) to (\S+)\.", "wc -l < $1 > $2", ("wc -c < $1 > $2", "cp $1 $2")),
    (
        r'Write the lines of (\S+) that contain "(\w+)" to (\S+)\.',
        "grep $2 $1 > $3",
        ("grep -v $2 $1 > $3", "cp $1 $3"),
    ),
    (r"Write (\S+) and then (\S+) to (\S+)\.", "cat $1 $2 > $3", ("cat $2 $1 > $3", "cp $1 $3")),
    (
        r"Make a folder (\S+) and move (\S+) into it\.",
        "mkdir $1 && mv $2 $1/",
        ("mkdir $1 && cp $2 $1/", "mv $2 $1"),
    ),
    (r"Write the first (\d) lines of (\S+) to (\S+)\.", "head -n $1 $2 > $3", ("tail -n $1 $2 > $3", "cp $2 $3")),
    (
        r"Each line of (\S+) is a number\. Write their sum to (\S+)\.",
        f"{_SUM} $1))) > $2",
        ("wc -l < $1 > $2", "cp $1 $2"),
    ),
)


def _terminal_commands(task: HarborTask) -> tuple[str, list[str]]:
    for asked, right, wrong in SKILLS:
        if found := re.fullmatch(asked, task.instruction):
            return found.expand(_groups(right)), [found.expand(_groups(template)) for template in wrong]
    raise AssertionError(f"no skill for {task.instruction!r}")


def _groups(template: str) -> str:
    """The template as `Match.expand` reads it."""
    return re.sub(r"\$(\d)", r"\\\1", template)


def _terminal_output(command: str, task: HarborTask) -> str:
    """The shell's output: empty, unless a file is missing."""
    program, first, *_ = command.split()
    if program in ("cp", "mv") and first not in task.start:
        return f"{program}: cannot stat '{first}': No such file or directory"
    return ""


def _has_expected_files(task: HarborTask, files: Mapping[str, bytes], reply: str) -> bool:
    """True if the files are right, by the rule of the environment's `inside/check.py`."""
    expected: dict[str, str | None] = json.loads(task.tests["expected.json"])
    found = {path: content.decode(errors="replace").strip() for path, content in files.items()}
    return all(found.get(path) == (None if wanted is None else wanted.strip()) for path, wanted in expected.items())


TERMINAL = _shell_toy(
    environment=TerminalEnvironment.name,
    make=TerminalEnvironment,
    generate=generated_task,
    commands=_terminal_commands,
    output_of=_terminal_output,
    is_right=_has_expected_files,
    look=lambda task: ("ls", "\n".join(sorted(task.start))),
    idle=0.35,
    looks=0.2,
    wrong=_WRONG_COMMAND,
    fixed=(_SUM, ")))"),
    vocabulary=1024,
    steps=1500,
    knows="the environment's twelve kinds of tasks, a command or three for each, and nothing else",
    skill=f"of the commands that they run {_WRONG_COMMAND:.0%} are another one than the task needs",
)

# Repairs --------------------------------------------------------------------------------------------------------------
# A right script replaces the wrong expression. The others replace it the wrong way round, by nothing, in all functions,
# or make the visible test say the opposite.

_REPAIR = re.compile(r"\w+ in (\w+\.py) is wrong: it must return (.+)\. Correct it and nothing else\.")
_WRONG_REPAIR = 0.5


def _module_and_function(task: HarborTask) -> tuple[str, Function]:
    """The file with the wrong function, and the function as it should be."""
    asked = _REPAIR.fullmatch(task.instruction)
    assert asked is not None, task.instruction
    return asked[1], next(function for function in FUNCTIONS if function.meaning == asked[2])


def repairs(task: HarborTask) -> tuple[str, tuple[str, ...]]:
    """The command that repairs the repository, and others, which do not."""
    module, function = _module_and_function(task)
    return _replace(function.wrong, function.right, module), (
        _replace(function.right, function.wrong, module),
        _replace(function.wrong, "None", module),
        _replace("return .*", f"return {function.right}", module),
        _replace("==", "!=", f"test_{module}"),
    )


def _replace(old: str, new: str, file: str) -> str:
    return f"sed -i 's|{old}|{new}|' {file}"


def _look_at_module(task: HarborTask) -> tuple[str, str]:
    module, _ = _module_and_function(task)
    return f"cat {module}", task.start[module].decode().strip()


def _is_repaired(task: HarborTask, files: Mapping[str, bytes], reply: str) -> bool:
    """True if the module's text is the expected one.

    Unlike `inside/check.py` of the environment this runs nothing, which is quicker, and refuses a right function that
    is written differently.
    """
    module, function = _module_and_function(task)
    before = task.start[module].decode()
    wanted = before.replace(f"return {function.wrong}\n", f"return {function.right}\n")
    return files.get(module) == wanted.encode()


SWE = _shell_toy(
    environment=SweEnvironment.name,
    make=SweEnvironment,
    generate=generated_repository,
    commands=repairs,
    output_of=lambda command, task: "",  # sed prints nothing
    is_right=_is_repaired,
    look=_look_at_module,
    idle=0.3,
    looks=0.4,
    wrong=_WRONG_REPAIR,
    vocabulary=768,
    steps=700,
    knows="the environment's twelve functions, five ways to change one, of which one is right, and nothing else",
    skill=f"{_WRONG_REPAIR:.0%} of the changes that they make are another one than the function needs",
)

# By name --------------------------------------------------------------------------------------------------------------

MODELS = Path(__file__).with_name("models")
CHAT_MODEL = MODELS / "chat"
"""The model of the demo without `--environment`, in Hugging Face's format."""
TOYS = {toy.environment: toy for toy in (TOOL_CALLS, TERMINAL, SWE)}


def toy_of(environment: str) -> Toy:
    """
    Raises:
        SetupError: no toy practises this.
    """
    if environment == "browser":
        raise SetupError(
            "--environment 'browser': no model that is small enough for a demo has learned to find elements on a page;"
            " docs/environments.md, Browser, has the commands that let yours practise"
        )
    if environment not in TOYS:
        raise SetupError(f"--environment {environment!r}: there are demos of {', '.join(TOYS)}")
    return TOYS[environment]
