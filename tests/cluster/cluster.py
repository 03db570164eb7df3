"""A simulated cluster on this machine: hosts with real sshd, pdsh, munge and Slurm in namespaces.

A host has its own network address, host name, processes, /dev/shm and /run. All hosts are below one
process namespace, so that no process outlives the cluster, and a `pkill` over ssh hits no process
outside it. The file system is shared, as in a cluster. Needs root and the Debian packages PACKAGES.

    with Cluster(hosts=4, slurm=True) as cluster:
        cluster.run("deepspeed --hostfile ...")         # on the head
        cluster.run("hostname", host="node1")
        cluster.kill_host("node2")
"""

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).resolve().parent
PACKAGES = "slurmctld slurmd slurm-client munge pdsh openssh-server openssh-client iproute2"
PROGRAMS = ("slurmctld", "slurmd", "srun", "munged", "pdsh", "sshd", "ssh-keygen", "ip", "unshare",
            "setpriv")  # fmt: skip
PROGRAMS_OF_HEAD = ("ip", "unshare", "setpriv", "nsenter")
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
SECONDS_TO_START = 60
NETWORK = "10.77.0"
OWN_NAMESPACES = (
    "unshare --net --mount --uts --pid --fork --mount-proc --kill-child --propagation private"
)


def missing(*, hosts: bool = True) -> str:
    """Return the reason that a cluster, or a head without hosts, cannot run here; "" if it can."""
    if os.geteuid() != 0:
        return "hosts of its own need root"
    programs = PROGRAMS if hosts else PROGRAMS_OF_HEAD
    absent = [name for name in programs if not shutil.which(name, path=PATH)]
    if absent:
        return f"{', '.join(absent)} not found; apt-get install --no-install-recommends {PACKAGES}"
    probe = subprocess.run([*shlex.split(OWN_NAMESPACES), "true"], capture_output=True, text=True)
    return f"no namespaces here: {probe.stderr.strip()}" if probe.returncode else ""


class Cluster:
    """A cluster of hosts named node1, node2, ..., each with two fake GPUs for Slurm, or `gpus`.

    hosts: number of hosts; with 0 there is only the head, which needs no sshd and no Slurm
    slurm: start slurmctld on the head and slurmd on the hosts
    """

    def __init__(self, hosts: int = 4, *, slurm: bool = False, gpus: int = 2):
        self.hosts = [f"node{number}" for number in range(1, hosts + 1)]
        self.slurm, self.gpus = slurm, gpus

    def __enter__(self) -> "Cluster":
        self.folder = Path(tempfile.mkdtemp(prefix="threefold-cluster-"))
        self._write_files()
        self.log = (self.folder / "log").open("w")
        self._root = subprocess.Popen(
            # The namespace ends with the process that made it, even if that is killed.
            [
                "setpriv",
                "--pdeathsig",
                "KILL",
                *shlex.split(OWN_NAMESPACES),
                HERE / "head.sh",
                self.folder,
                NETWORK,
            ],
            stdin=subprocess.DEVNULL,
            stdout=self.log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            self._until((self.folder / "head.ready").exists, "the head")
            for host in self.hosts:
                self._start(host)
            for host in self.hosts:
                self._until(lambda host=host: self._answers(host), host)
            if self.slurm:
                self._until(self._is_idle, "Slurm")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._root.kill()  # --kill-child then ends the namespace with all its processes
        self._root.wait()
        self.log.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def command(self, command: str, host: str = "head") -> list[str]:
        """Return the command that runs a shell command on a host."""
        if host != "head":
            command = shlex.join(["ssh", host, f"cd {shlex.quote(os.getcwd())}; {command}"])
        child = f"/proc/{self._root.pid}/task/{self._root.pid}/children"
        inside = Path(child).read_text().split()[0]
        into = f"nsenter -t {inside} -n -m -u -p --wd={os.getcwd()} bash -c"
        return [*shlex.split(into), command]

    def run(
        self, command: str, host: str = "head", *, timeout: float = 300, **settings: object
    ) -> subprocess.CompletedProcess[str]:
        """Run a shell command on a host to its end."""
        return subprocess.run(
            self.command(command, host),
            env=self.environment | settings.pop("env", {}),
            capture_output=True,
            text=True,
            timeout=timeout,
            **settings,
        )

    @property
    def environment(self) -> dict[str, str]:
        """Return the environment of commands on the head, without that of this process."""
        return {
            "PATH": f"{Path(sys.executable).parent}:{PATH}",
            "HOME": str(self.folder / "home"),
            "SLURM_CONF": str(self.folder / "slurm.conf"),
            "LANG": "C.UTF-8",
        }

    def kill_host(self, host: str) -> None:
        """End a host at once, as if its power were cut."""
        self.run(f"kill -9 $(cat {self.folder}/{host}.pid)")

    def restart_host(self, host: str) -> None:
        """Bring a killed host back."""
        self._start(host)
        self._until(lambda: self._answers(host), host)

    def stop_host(self, host: str) -> None:
        """Suspend all processes of a host, as if its kernel hung."""
        self._signal_all(host, "STOP")

    def resume_host(self, host: str) -> None:
        """Let the processes of a suspended host continue."""
        self._signal_all(host, "CONT")

    def _signal_all(self, host: str, name: str) -> None:
        """Send a signal to all processes of a host but its first one."""
        inside = f"nsenter -t $(cat {self.folder}/{host}.pid) -p"
        self.run(f"{inside} bash -c 'kill -{name} -1'")

    def cut_link(self, host: str) -> None:
        """Cut a host's network; its processes continue."""
        self.run(f"ip link set {host} down")

    def mend_link(self, host: str) -> None:
        """Restore a host's network."""
        self.run(f"ip link set {host} up")

    def processes(self, pattern: str) -> list[str]:
        """Return the command lines, on all hosts, that match a regular expression."""
        found = self.run(f"pgrep -af -- {shlex.quote(pattern)}").stdout.splitlines()
        return [line for line in found if "pgrep" not in line]

    def _start(self, host: str) -> None:
        number = int(host.removeprefix("node"))
        arguments = [str(self.folder), host, f"{NETWORK}.{number}", "slurm" if self.slurm else ""]
        started = self.run(
            f"{HERE}/add_host.sh {shlex.join(arguments)} {shlex.quote(OWN_NAMESPACES)}"
        )
        if started.returncode:
            words = (self.folder / f"{host}.log").read_text()
            raise RuntimeError(f"{host} does not start: {started.stderr}{words}")

    def _answers(self, host: str) -> bool:
        return self.run("true", host=host).returncode == 0

    def _is_idle(self) -> bool:
        counted = self.run("sinfo --noheader --states=idle --format=%D").stdout.strip()
        return counted == str(len(self.hosts))

    def _until(self, condition: Callable[[], bool], name: str) -> None:
        deadline = time.monotonic() + SECONDS_TO_START
        while not condition():
            if time.monotonic() > deadline or self._root.poll() is not None:
                raise RuntimeError(f"{name} does not start: {(self.folder / 'log').read_text()}")
            time.sleep(0.05)

    def _write_files(self) -> None:
        folder = self.folder
        (folder / "home").mkdir()
        for name in ("state", *(f"spool-{host}" for host in self.hosts)):
            (folder / name).mkdir()
        names = [f"{NETWORK}.254 head"] if self.hosts else ["127.0.0.1 head"]
        names += [f"{NETWORK}.{number} {host}" for number, host in enumerate(self.hosts, 1)]
        (folder / "hosts").write_text("127.0.0.1 localhost\n" + "\n".join(names) + "\n")
        if not self.hosts:
            return
        for key in ("user_key", "host_key"):
            command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / key]
            subprocess.run(command, check=True)
        (folder / "munge.key").write_bytes(os.urandom(128))
        (folder / "munge.key").chmod(0o600)
        (folder / "ssh_config").write_text(SSH_CONFIG.format(folder=folder))
        (folder / "sshd_config").write_text(
            SSHD_CONFIG.format(folder=folder, path=self.environment["PATH"])
        )
        devices = FAKE_DEVICES[: self.gpus]
        gres = [f"NodeName=node[1-{len(self.hosts)}] Name=gpu File={file}" for file in devices]
        (folder / "gres.conf").write_text("\n".join(["AutoDetect=off", *gres]) + "\n")
        (folder / "slurm.conf").write_text(
            SLURM_CONFIG.format(
                folder=folder,
                hosts=f"node[1-{len(self.hosts)}]",
                gpus=self.gpus,
                cores=12 * self.gpus,
                memory=250_000 * self.gpus,
                network=NETWORK,
            )
        )


# Slurm wants a device file per GPU; it never opens them here.
FAKE_DEVICES = ["/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom", "/dev/tty",
                "/dev/ptmx", "/dev/kmsg"]  # fmt: skip

SSH_CONFIG = """\
Host *
  User root
  IdentityFile {folder}/user_key
  IdentitiesOnly yes
  BatchMode yes
  StrictHostKeyChecking no
  UserKnownHostsFile /dev/null
  LogLevel ERROR
  ConnectTimeout 5
  ServerAliveInterval 2
  ServerAliveCountMax 3
"""

SSHD_CONFIG = """\
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/user_key.pub
StrictModes no
UsePAM no
PasswordAuthentication no
PermitRootLogin prohibit-password
SetEnv SLURM_CONF={folder}/slurm.conf PATH={path}
UseDNS no
PidFile none
MaxStartups 100
LogLevel ERROR
"""

SLURM_CONFIG = """\
ClusterName=threefold
SlurmctldHost=head({network}.254)
SlurmUser=root
AuthType=auth/munge
CredType=cred/munge
# cred_expire: a requeued job may start again after seconds instead of two minutes
AuthInfo=socket={folder}/munge.socket,cred_expire=5
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=bf_interval=2,sched_interval=2,batch_sched_delay=0
EnforcePartLimits=ALL
# config_overrides: nodes may have fewer cores and less memory than they claim
SlurmdParameters=config_overrides
ReturnToService=2
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SlurmctldTimeout=30
SlurmdTimeout=10
KillWait=5
MessageTimeout=5
MinJobAge=300
JobRequeue=1
GresTypes=gpu
NodeName={hosts} CPUs={cores} RealMemory={memory} Gres=gpu:{gpus} State=UNKNOWN
PartitionName=gpu Nodes={hosts} Default=YES MaxTime=INFINITE DefaultTime=5 State=UP
"""
