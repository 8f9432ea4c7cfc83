"""A picture of a running server's dashboard, for the README: `python tools/dashboard_picture.py URL OUT.png`.

Needs chromium, chromedriver and selenium. Put load on the server first (`ostinato bench serve`): or charts are flat.
"""

from __future__ import annotations

import argparse
import base64
import shutil
import tempfile
import time
from pathlib import Path

from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import WebDriverWait

FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run")
FLAGS += ("--disable-background-networking", "--disable-component-update", "--disable-sync")


def take(url: str, out: Path, message: str, dark: bool) -> None:
    """Ask one thing in the chat box, twice, and photograph the page."""
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    with tempfile.TemporaryDirectory() as profile:
        for flag in (*FLAGS, f"--user-data-dir={profile}"):
            options.add_argument(flag)
        browser = webdriver.Chrome(
            options=options, service=webdriver.ChromeService(shutil.which("chromedriver"))
        )
        try:
            theme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
            browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": theme})
            size = {"width": 1440, "height": 1000, "deviceScaleFactor": 1, "mobile": False}
            browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
            browser.get(url)
            wait = WebDriverWait(browser, 60)
            wait.until(lambda b: b.find_element(By.ID, "state").text == "ready")
            browser.execute_script("document.querySelector('input[name=span][value=\"60\"]').click()")
            browser.execute_script("document.getElementById('chat-tokens').value = 60")
            browser.find_element(By.ID, "chat-text").send_keys(message + Keys.ENTER)
            wait.until(lambda b: b.find_elements(By.CSS_SELECTOR, ".meta button:enabled"))
            browser.find_element(By.CSS_SELECTOR, ".meta button").click()
            wait.until(lambda b: len(b.find_elements(By.CSS_SELECTOR, ".meta button:enabled")) == 2)
            time.sleep(2.5)
            picture = browser.execute_cdp_cmd(
                "Page.captureScreenshot", {"format": "png", "captureBeyondViewport": True}
            )
            out.write_bytes(base64.b64decode(picture["data"]))
        finally:
            browser.quit()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("url")
    parser.add_argument("out", type=Path)
    parser.add_argument("--message", default="My dear Mr. Bennet, have you heard")
    parser.add_argument("--dark", action="store_true")
    arguments = parser.parse_args()
    take(arguments.url, arguments.out, arguments.message, arguments.dark)


if __name__ == "__main__":
    main()
