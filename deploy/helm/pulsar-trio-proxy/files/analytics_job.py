"""What spark-submit runs in the CronJob: the jobs that are installed in the image."""

from analytics.cli import main

main()
