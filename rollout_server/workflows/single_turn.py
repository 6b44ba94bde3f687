"""One prompt, one response, one reward."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

import xxhash

from relax_common.failpoints import failpoint
from relax_common.rows import RewardStatus
from rollout_server import metrics
from rollout_server.engines.contract import Engine, EngineError, FinishReason, GenerateRequest, SamplingParams
from rollout_server.rewards.outcome import Overlong, RewardItem
from rollout_server.rewards.pool import RewardPool
from rollout_server.tokenizers import PromptError, TextTokenizer
from rollout_server.trajectory.samples import make_rows, no_rows
from rollout_server.workflows.base import GroupResult, GroupTask


@dataclass(frozen=True)
class SingleTurn:
    """A truncated response (finish reason length) is scored like any other: its reward sees that no answer came."""

    engine: Engine
    tokenizer: TextTokenizer
    rewards: RewardPool
    sampling: SamplingParams
    prompt_tokens_max: int
    generate_timeout_seconds: float
    seed: int = 0
    overlong: Overlong | None = None
    reward_parts: Sequence[str] = ()
    """Parts of the reward that become a field of the rows."""

    async def run(self, task: GroupTask) -> GroupResult:
        prompt_ids = self._prompt_ids(task)
        started = time.time()
        if not task.samples:  # an earlier lease left all of them complete
            return GroupResult(no_rows(), [], started, started)
        request = GenerateRequest(task.request_id, prompt_ids, len(task.samples), self.sampling, self._seeds(task))
        try:
            async with asyncio.timeout(self.generate_timeout_seconds):
                completions = await asyncio.wrap_future(self.engine.generate(request))
        except TimeoutError as error:
            # This ends the server; relaxd restarts it, and its leases return to the queue.
            raise EngineError(
                f"the engine has not answered request {task.request_id} for {self.generate_timeout_seconds:.0f} s"
            ) from error
        ended = time.time()
        finished = [
            (sample, completion)
            for sample, completion in zip(task.samples, completions, strict=True)
            if completion.finish_reason is not FinishReason.ABORT
        ]
        texts = self.tokenizer.decode_responses([each.token_ids.tolist() for _, each in finished])
        begun = self.tokenizer.begun_text(task.prompt)
        shown = task.prompt if isinstance(task.prompt, str) else list(task.prompt.messages)
        items = [RewardItem(shown, text, task.label, task.metadata, begun) for text in texts]
        outcomes = await asyncio.wrap_future(self.rewards.score(items))
        if self.overlong is not None:
            lengths = [len(each.token_ids) for _, each in finished]
            outcomes = [self.overlong.applied(*each) for each in zip(outcomes, lengths, strict=True)]
        for outcome in outcomes:
            failpoint("rollout.after_n_samples")
            for name, value in outcome.parts.items():
                metrics.REWARD_PARTS.labels(name).observe(value)
        samples, completions = [each for each, _ in finished], [each for _, each in finished]
        rows = make_rows(samples, prompt_ids, completions, self.sampling.temperature, outcomes, self.reward_parts)
        reasons = [outcome.reason for outcome in outcomes if outcome.status is not RewardStatus.OK]
        return GroupResult(rows, reasons, started, ended)

    def _seeds(self, task: GroupTask) -> list[int]:
        """A sample depends only on the run's seed and its own name, not on where and when it is generated."""
        names = (f"{self.seed}/{task.group}/{sample}" for sample in task.samples)
        return [xxhash.xxh3_64_intdigest(name.encode()) >> 1 for name in names]

    def _prompt_ids(self, task: GroupTask) -> list[int]:
        ids = self.tokenizer.encode_prompt(task.prompt)
        if not ids:
            raise PromptError("the prompt has no tokens")
        if len(ids) > self.prompt_tokens_max:
            raise PromptError(f"the prompt has {len(ids)} tokens, data.prompt_tokens_max = {self.prompt_tokens_max}")
        return ids
