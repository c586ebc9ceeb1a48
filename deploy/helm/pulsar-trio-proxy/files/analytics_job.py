"""Main file for spark-submit in the CronJob: calls the program that is installed in the image."""

from analytics.cli import main

main()
