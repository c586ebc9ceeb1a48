"""Main file for spark-submit in the CronJob: calls the jobs that are installed in the image."""

from analytics.cli import main

main()
