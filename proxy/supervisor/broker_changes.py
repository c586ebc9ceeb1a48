"""Changes by which brokers are reached: tried at brokers, and in force only once one of them accepts the proxy.

They are settings (``brokers.service_url``, ``tls``, ``credentials``), or the content of the files that these name. A
wrong one would fail every client of every instance at the same time. So what was accepted last stays in force:

* changed settings are refused as long as those in force work; where these do not work either, there is nothing to lose;
* changed files are not taken over, even in an outage of the brokers: what the workers have of the content before exists
  nowhere else.

No client has a say: the verdict is that of logins which the proxy makes for itself. One trial decides for all workers,
so a removed authority is trusted by none of them as soon as one broker was accepted without it.
"""

from collections.abc import Awaitable, Callable

import trio
from prometheus_client import Gauge

from proxy.common.logs import get_logger
from proxy.common.reloading_file import file_stamps
from proxy.config.trial import BrokerTrial, broker_files, reaches_brokers_alike
from proxy.config.types import Config
from proxy.runtime.loop.tasks import Backoff
from proxy.supervisor.cluster.cluster import Cluster
from proxy.supervisor.config_watch import ChangeDetector
from proxy.supervisor.processes.broker_trial import TrialNotRun, run_trial
from proxy.supervisor.processes.configure import ReloadRefused
from proxy.supervisor.processes.signals import in_thread_without_signals

WATCH_INTERVAL_S = 1.0
RETRY_PAUSE_FIRST_S = 5.0
RETRY_PAUSE_MAX_S = 30.0
"""Pause before refused files are tried again: a broker may know a new token later, or come back."""

UNSETTLED_POLLS_MAX = 3
"""Polls at each of which files had another content, after which they are tried all the same."""
ACCEPTED_IN_MOTION = 2
"""Contents that brokers have accepted and that were replaced during their trial, one after the other, after which the
content that replaced the last one is taken over untried. Otherwise a token that a sidecar replaces every second would
never be taken over, and the one in force would end.
"""

IN_FORCE_WAIT_S = 6.0
"""Time in which lookup workers show that what is in force works: they may have been reconfigured a moment ago."""
IN_FORCE_POLL_S = 0.5

FILES_NOTE = (
    "changed files of brokers.tls or brokers.credentials are not in force, since no broker accepts the proxy with them"
)

Stamps = dict[str, str]


class BrokerChanges:
    """Decides on changes of a cluster. ``works``: whether brokers accept the proxy with what is in force.
    ``lock`` excludes reloads.
    """

    def __init__(
        self,
        cluster: Cluster,
        works: Callable[[], Awaitable[bool]],
        lock: trio.Lock,
        trial: Callable[[Config], Awaitable[BrokerTrial]] = run_trial,
    ) -> None:
        self._cluster = cluster
        self._works = works
        self._lock = lock
        self._trial = trial
        self._stamps: Stamps = _read_stamps(cluster.config)
        pauses = Backoff(initial_s=RETRY_PAUSE_FIRST_S, max_s=RETRY_PAUSE_MAX_S)
        self._detector = ChangeDetector(pauses, UNSETTLED_POLLS_MAX)
        self._logged: Stamps | None = None
        self._accepted_in_motion = 0
        self._workers_may_differ = False
        """Whether files were seen that are not in force: a worker that started then has read them."""
        self.on_files_taken_over: Callable[[], None] = lambda: None
        """Called for files that a broker has accepted: a configuration that was refused may have waited for them."""
        self.are_files_held = False
        """Whether files have changed, and the content before is in force."""
        held = Gauge(
            "pulsar_proxy_broker_files_held",
            "Whether changed files of brokers.tls or brokers.credentials are not in force, since no broker accepts "
            "the proxy with them.",
            registry=cluster.registry,
        )
        held.set_function(lambda: float(self.are_files_held))

    # ---- settings

    async def require_acceptance(self, config: Config) -> Stamps:
        """Return the stamps of the files that go with a configuration, for ``on_applied``, if it may be applied.

        Raises ReloadRefused where no broker accepts the proxy with it, and one does with what is in force.
        """
        stamps = await self.read_stamps(config)
        if reaches_brokers_alike(self._cluster.config, config) and stamps == self._stamps:
            return stamps
        try:
            trial = await self._trial(config)
            why = f"no broker accepts the proxy with the changed settings or files ({trial.reason})"
        except TrialNotRun as not_run:
            trial, why = BrokerTrial(accepted=False), f"the changed settings or files cannot be tried ({not_run})"
        if not trial.accepted:
            if await self._in_force_works():
                raise ReloadRefused(
                    f"brokers: {why}, and those in force work; correct them, or apply them all the same by "
                    "`pulsar-trio-proxy reload --force`"
                )
            get_logger().warning("applying settings that no broker accepts: those in force do not work", reason=why)
        after = await self.read_stamps(config)
        if stamps != after and not (trial.accepted and self._are_files_in_motion):
            raise ReloadRefused("brokers: their files have changed while they were tried; reload once more")
        return after

    def on_applied(self, stamps: Stamps) -> None:
        """Record that all workers have the cluster's configuration, and the content of files with these stamps."""
        self._stamps = stamps
        self._workers_may_differ = False
        self.are_files_held = False
        self._logged = None

    async def _in_force_works(self) -> bool:
        with trio.move_on_after(IN_FORCE_WAIT_S):
            while not await self._works():  # noqa: ASYNC110 -- another process knows
                await trio.sleep(IN_FORCE_POLL_S)
            return True
        return False

    # ---- files

    async def watch_files(self) -> None:
        """Try changed files, and have workers take them over once a broker accepts the proxy with them.

        What is in force needs no trial where it comes back, with the same stamps: a file that is moved aside and back.
        """
        while True:
            await trio.sleep(WATCH_INTERVAL_S)
            stamps = await self.read_stamps(self._cluster.config)
            content = repr(sorted(stamps.items())).encode()
            if stamps != self._stamps and not self._workers_may_differ:
                self._workers_may_differ = True
                self._detector.note_chance()  # of what is in force, too, once it is there again
            if not self._workers_may_differ:
                self._detector.note_attempt(content)
            elif self._detector.is_due(content, trio.current_time()):
                async with self._lock:
                    done = await self._take_over_changed_files()
                if not done:
                    self._detector.note_failure(trio.current_time())

    @property
    def _are_files_in_motion(self) -> bool:
        """Whether files are replaced faster than they can be tried, by a writer whose contents brokers accept."""
        return self._accepted_in_motion >= ACCEPTED_IN_MOTION

    async def _take_over_changed_files(self) -> bool:
        """Return False where it should be tried again."""
        config = self._cluster.config
        stamps = await self.read_stamps(config)
        if stamps == self._stamps and not self._workers_may_differ:
            return True
        if stamps != self._stamps and not await self._may_take_over(config, stamps):
            return False
        after = await self.read_stamps(config)
        if stamps == after:
            self._accepted_in_motion = 0
        else:  # another content than the one that was tried
            self._accepted_in_motion += 1
            if not self._are_files_in_motion:
                return False
            stamps = after
        failures = await self._cluster.take_over_files(stamps)
        if failures:
            self._hold(stamps, f"a broker accepts it, but not every worker took it over: {'; '.join(failures)}")
            return False
        get_logger().info("took over a changed file", key="brokers", files=self._changed_files(stamps))
        self.on_applied(stamps)
        self.on_files_taken_over()
        return True

    async def _may_take_over(self, config: Config, stamps: Stamps) -> bool:
        """Try the content of files; hold it and return False where workers should go on with the one before."""
        try:
            trial = await self._trial(config)
        except TrialNotRun as not_run:
            if await self._in_force_works():
                self._hold(stamps, f"it cannot be tried: {not_run}")
                return False
            return True
        if not trial.accepted:
            self._accepted_in_motion = 0
            self._hold(stamps, f"no broker accepts the proxy with it: {trial.reason}")
        return trial.accepted

    def _hold(self, stamps: Stamps, reason: str) -> None:
        """Go on with the content before; log it once for each content."""
        self.are_files_held = True
        if stamps != self._logged:
            self._logged = stamps
            get_logger().error(
                "a changed file is not in force; going on with what it was before",
                key="brokers",
                files=self._changed_files(stamps),
                reason=reason,
            )

    def _changed_files(self, stamps: Stamps) -> str:
        """Name the files that are not as in force; all of them where all are so again."""
        changed = [file for file, stamp in stamps.items() if stamp != self._stamps.get(file)]
        return ", ".join(sorted(changed or stamps))

    @staticmethod
    async def read_stamps(config: Config) -> Stamps:
        """Read the stamps of a configuration's files, in a thread: a file system that hangs must not stop all else."""
        return await in_thread_without_signals(_read_stamps, config) if broker_files(config) else {}


def _read_stamps(config: Config) -> Stamps:
    return file_stamps(broker_files(config))
