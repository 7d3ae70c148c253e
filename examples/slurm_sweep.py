"""A sweep on a SLURM cluster.

    python examples/slurm_sweep.py --workers 32 --memory 4GB -- \\
        reproduce figure-4 --scale paper --out /shared/results

Run it on a machine that can submit jobs and that the compute nodes can connect to. It submits one
job per worker. A job that ends, at its time limit or earlier, is replaced by a new one. What
follows `--` is the command of `steptuned`. Its folder --out must be on a file system that all nodes
share and that supports locks (flock). You can stop this script and start it again at any time:
finished work is in that folder. Needs the extras `lab` and `dask`.

Tested with SLURM 22.05 on one machine, where a cancelled job and jobs that reached their time limit
were replaced. Not tested on several nodes.

With --job-script it submits nothing and prints the job script. If jobs cannot connect to the
machine that submits them, start the scheduler and the workers in your own jobs (`dask scheduler`,
`dask worker ADDRESS --nthreads 1 --nworkers N`) and pass the scheduler's address to `steptuned`:
--dask ADDRESS.
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
        help="number of jobs at the same time; each executes one run after another",
    )
    parser.add_argument("--cores", type=int, default=1, help="cores per job, for torch's threads")
    parser.add_argument("--memory", default="4GB", help="memory per job")
    parser.add_argument("--walltime", default="04:00:00", help="time limit of a job")
    parser.add_argument("--partition", help="partition; default: that of the cluster")
    parser.add_argument("--account", help="account to charge")
    parser.add_argument(
        "--interface", help="network interface of scheduler and workers, such as ib0"
    )
    parser.add_argument(
        "--job-script", action="store_true", help="print the job script and submit nothing"
    )
    parser.add_argument("command", nargs="*", help="arguments of steptuned")
    arguments = parser.parse_args()
    # dask_jobqueue replaces the handler by one that exits with success.
    signal.signal(signal.SIGINT, signal.default_int_handler)
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
            except KeyboardInterrupt:  # the subprocess got it too
                return steptuned.wait()


def cluster_of(arguments: argparse.Namespace) -> SLURMCluster:
    """Workers have one thread, since a run needs its own process; more cores are for torch."""
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
