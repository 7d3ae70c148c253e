"""A sweep on a SLURM cluster. Run, where jobs can be submitted from and the compute nodes can connect to:

    python examples/slurm_sweep.py --workers 32 --memory 4GB -- reproduce figure-4 --scale paper --out /shared/results

Submits one job a worker and keeps as many: a job that ends, at its time limit or before, is replaced by a new one. What follows
`--` is the command of `steptuned`, whose folder --out must be on a file system that all nodes share, and one with locks (flock).
Stop it and start it again at will: what was done is in that folder. Needs the extras `lab` and `dask`.

Tried with SLURM 22.05 on one machine, where a job that was cancelled and jobs that reached their time limit were replaced; not on
several nodes.

With --job-script it submits nothing and prints what it would submit. Where jobs may not connect to the machine they come from,
start the scheduler and the workers in jobs of your own (`dask scheduler`, `dask worker ADDRESS --nthreads 1 --nworkers N`) and
give `steptuned` the scheduler's address: --dask ADDRESS.
"""

import argparse
import signal
import subprocess
import sys

from dask_jobqueue.slurm import SLURMCluster


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--workers",
        type=int,
        default=4,
        help="jobs at the same time, each making one run after another",
    )
    parser.add_argument("--cores", type=int, default=1, help="cores of a job, for torch's threads")
    parser.add_argument("--memory", default="4GB", help="memory of a job")
    parser.add_argument("--walltime", default="04:00:00", help="time limit of a job")
    parser.add_argument(
        "--partition", help="where jobs are queued; by default where your cluster says"
    )
    parser.add_argument("--account", help="on whose account")
    parser.add_argument(
        "--interface", help="network that scheduler and workers talk through, such as ib0"
    )
    parser.add_argument(
        "--job-script", action="store_true", help="print the job script and submit nothing"
    )
    parser.add_argument("command", nargs="*", help="arguments of steptuned")
    arguments = parser.parse_args()
    signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # dask_jobqueue has made Ctrl-C a success
    with cluster_of(arguments) as cluster:
        if arguments.job_script:
            print(cluster.job_script())
            return 0
        cluster.adapt(minimum_jobs=arguments.workers, maximum_jobs=arguments.workers)
        command = [
            sys.executable,
            "-m",
            "steptuned",
            *arguments.command,
            "--dask",
            cluster.scheduler_address,
        ]
        with subprocess.Popen(command) as steptuned:
            try:
                return steptuned.wait()
            except KeyboardInterrupt:  # which it got too
                return steptuned.wait()


def cluster_of(arguments: argparse.Namespace) -> SLURMCluster:
    """Workers have one thread, for a run needs a process of its own; further cores of a job are for torch."""
    return SLURMCluster(
        cores=1,
        processes=1,
        job_cpu=arguments.cores,
        job_script_prologue=[
            f"export OMP_NUM_THREADS={arguments.cores} MKL_NUM_THREADS={arguments.cores}"
        ],
        memory=arguments.memory,
        walltime=arguments.walltime,
        queue=arguments.partition,
        account=arguments.account,
        interface=arguments.interface,
        scheduler_options={"dashboard": False},
    )


if __name__ == "__main__":
    sys.exit(main())
