"""What `make report-pictures` runs in the environment: the sample page, and its pictures."""

from local.environment import ROOT
from local.report_pictures import take_screenshots

from analytics.report.page import render_page
from tests.analytics.report_sample import sample_report

PAGES = {
    "day": sample_report,
    "ten-minutes": lambda: sample_report(1 / 6, minutes_of_data=4, only_one=True),
    "one-minute": lambda: sample_report(1 / 6, minutes_of_data=1, only_one=True),
}


def main() -> None:
    directory = ROOT / "build" / "report-pictures"
    directory.mkdir(parents=True, exist_ok=True)
    for name, report in PAGES.items():
        file = directory / f"{name}.html"
        file.write_text(render_page(report()), encoding="utf-8")
        for picture in take_screenshots(file, directory):
            print(picture)


if __name__ == "__main__":
    main()
