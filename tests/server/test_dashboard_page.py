"""The dashboard in a real browser, served by a real server: its charts have data, its chat answers, its keys work.

Skips without Debian's chromium and chromium-driver (or the same programs from elsewhere).
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import WebDriverWait

from ostinato.engine.launch import locate_model

Server = Any
Browser = webdriver.Chrome
PATIENCE_S = 40
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--window-size=1440,900",
)
CHARTS = ("output", "ttft", "requests", "prompt", "itl", "kv")


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    program, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if program is None or driver is None:
        pytest.skip("needs chromium and chromedriver (Debian: apt-get install chromium chromium-driver)")
    options = webdriver.ChromeOptions()
    options.binary_location = program
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('chromium')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    browser = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    yield browser
    browser.quit()


@pytest.fixture
def browser(chromium: Browser) -> Iterator[Browser]:
    """The browser; a test must leave no error on its console but failed requests that it provoked."""
    chromium.get_log("browser")
    yield chromium
    complaints = [line["message"] for line in chromium.get_log("browser") if line["level"] == "SEVERE"]
    chromium.get("about:blank")
    assert not [line for line in complaints if "Failed to load resource" not in line]


def wait(browser: Browser, condition: Callable[[], Any]) -> Any:
    return WebDriverWait(browser, PATIENCE_S, 0.05).until(lambda _: condition())


def by_id(browser: Browser, name: str) -> WebElement:
    return browser.find_element(By.ID, name)


def open_page(browser: Browser, server: Server) -> None:
    browser.get(f"{server.url}/")
    browser.execute_script("sessionStorage.clear(); localStorage.clear()")
    browser.refresh()


def say(browser: Browser, words: str, tokens: int = 12) -> None:
    """Write a message and press Enter."""
    browser.execute_script(f"document.getElementById('chat-tokens').value = {tokens}")
    by_id(browser, "chat-text").send_keys(words + Keys.ENTER)


def answers(browser: Browser) -> list[WebElement]:
    return browser.find_elements(By.CSS_SELECTOR, ".turn.assistant:not(.running)")


def test_charts_and_chat(browser: Browser, server: Server) -> None:
    open_page(browser, server)
    wait(browser, lambda: by_id(browser, "state").text == "ready")
    wait(browser, lambda: by_id(browser, "chat-title").text == "Chat")
    below = "return document.getElementById('chat-send').getBoundingClientRect().bottom - innerHeight"
    assert browser.execute_script(below) <= 0, "the button to send lies below the window"
    say(browser, "It is a truth")
    wait(browser, lambda: len(answers(browser)) == 1)
    first = answers(browser)[0]
    assert first.find_element(By.CSS_SELECTOR, ".words").text.strip()
    assert re.search(r"\b\d+ tokens?\b", first.text)
    first.find_element(By.TAG_NAME, "button").click()
    wait(browser, lambda: len(answers(browser)) == 2)
    assert "the same, word for word" in answers(browser)[1].text
    say(browser, "Indeed?")
    wait(browser, lambda: len(answers(browser)) == 3)
    asked = [line for line in server.requests() if line["path"] == "/v1/chat/completions"][-3:]
    assert asked[0]["prompt_tokens"] == asked[1]["prompt_tokens"]
    assert asked[2]["prompt_tokens"] > asked[0]["prompt_tokens"], "a turn carries those before it"

    def values(chart: str) -> int:
        return int(by_id(browser, f"chart-{chart}").get_attribute("data-values") or 0)

    wait(browser, lambda: all(values(chart) > 0 for chart in CHARTS))
    lines = "return document.querySelectorAll('#chart-output .stroke, #chart-output .dot').length"
    assert browser.execute_script(lines) > 0
    wait(browser, lambda: int(by_id(browser, "heat").get_attribute("data-tokens") or 0) > 0)
    colours = """
        const canvas = document.getElementById("heat");
        const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
        return new Set(new Uint32Array(pixels.buffer)).size;
    """
    assert browser.execute_script(colours) > 8
    # In one call: each second brings new rows, and the old ones are gone in the middle of a look at them.
    texts = "return [...document.querySelectorAll('#buckets tr')].map((row) => row.innerText)"
    rows = [" ".join(text.split()) for text in browser.execute_script(texts)]
    assert any(row.startswith("decode 1") for row in rows)
    assert any(row.startswith("extend") for row in rows)
    assert "qwen3_moe, 4 layers, 8 experts" in by_id(browser, "facts").text


def test_keyboard_theme_and_width(browser: Browser, server: Server) -> None:
    open_page(browser, server)
    chart = wait(browser, lambda: by_id(browser, "chart-requests"))
    wait(browser, lambda: int(chart.get_attribute("data-values") or 0) > 1)
    drawing, moment = chart.find_element(By.TAG_NAME, "svg"), chart.find_element(By.CLASS_NAME, "chart-time")
    assert moment.text == ""
    browser.execute_script("arguments[0].focus()", drawing)
    drawing.send_keys(Keys.ARROW_LEFT)
    assert moment.text.count(":") == 2
    assert "running" in (drawing.get_attribute("aria-label") or "")
    drawing.send_keys(Keys.ESCAPE)
    assert moment.text == ""
    heat = by_id(browser, "heat")
    browser.execute_script("arguments[0].focus()", heat)
    heat.send_keys(Keys.ARROW_RIGHT, Keys.ARROW_DOWN)
    assert by_id(browser, "heat-readout").text.startswith("layer 1, expert 0:")

    background = "return getComputedStyle(document.body).backgroundColor"
    seen = set()
    for theme in ("Light", "Dark"):
        by_id(browser, "theme").click()
        assert by_id(browser, "theme").text == theme
        seen.add(browser.execute_script(background))
    assert len(seen) == 2

    for width in (390, 800, 1440):
        size = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": False}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_a_refusal_is_shown_in_the_servers_words(browser: Browser, server: Server) -> None:
    open_page(browser, server)
    wait(browser, lambda: by_id(browser, "chat-title").text == "Chat")
    say(browser, "Hello", tokens=0)
    wait(browser, lambda: len(answers(browser)) == 1)
    assert "max_tokens" in answers(browser)[0].find_element(By.CLASS_NAME, "error").text


def test_an_answer_can_be_stopped(browser: Browser, server: Server) -> None:
    open_page(browser, server)
    wait(browser, lambda: by_id(browser, "chat-title").text == "Chat")
    by_id(browser, "chat-text").send_keys("Once upon a time")
    # In one go, since the demo model has answered before a person could reach the button.
    label = """
        const form = document.getElementById("chat-form"), button = document.getElementById("chat-send");
        form.requestSubmit();
        const label = button.textContent;
        form.requestSubmit();
        return label;
    """
    assert browser.execute_script(label) == "Stop"
    wait(browser, lambda: len(answers(browser)) == 1)
    assert "stopped" in answers(browser)[0].text
    assert by_id(browser, "chat-send").text == "Send"


def test_thoughts_are_shown(browser: Browser, start_server: Callable[..., Server], tmp_path: Path) -> None:
    """A model that thinks first may come to its longest answer before its first word."""
    model = tmp_path / "demo"
    shutil.copytree(locate_model(None), model)
    (model / "chat_template.jinja").write_text("{{ messages[0].content }}<think>{# </think> #}")
    server = start_server("--model", str(model))
    server.wait_ready()
    open_page(browser, server)
    wait(browser, lambda: by_id(browser, "chat-title").text == "Chat")
    say(browser, "It is a truth")
    wait(browser, lambda: len(answers(browser)) == 1)
    first = answers(browser)[0]
    assert first.find_element(By.CSS_SELECTOR, ".thoughts").text.strip()
    assert first.find_element(By.CSS_SELECTOR, ".words").text == ""
    first.find_element(By.TAG_NAME, "button").click()
    wait(browser, lambda: len(answers(browser)) == 2)
    assert "the same, word for word" in answers(browser)[1].text
    texts = [turn.find_element(By.CSS_SELECTOR, ".thoughts").text for turn in answers(browser)]
    assert texts[0] == texts[1]


@pytest.fixture
def plain_model(tmp_path: Path) -> Path:
    """The demo model without a chat template."""
    directory = tmp_path / "plain"
    directory.mkdir()
    for file in locate_model(None).iterdir():
        if file.is_file() and "template" not in file.name:
            (directory / file.name).symlink_to(file.resolve())
    settings = directory / "tokenizer_config.json"
    changed = json.loads(settings.read_text())
    changed.pop("chat_template", None)
    settings.unlink()
    settings.write_text(json.dumps(changed))
    return directory


def test_completions_with_a_key_and_the_end_of_the_server(
    browser: Browser, start_server: Callable[..., Server], plain_model: Path
) -> None:
    server = start_server("--model", str(plain_model), "--api-key", "sesame")
    server.wait_ready()
    open_page(browser, server)
    for key, error in (("wrong", "The server refused that key."), ("sesame", "")):
        wait(browser, lambda: by_id(browser, "key-dialog").get_attribute("open"))
        by_id(browser, "key-input").send_keys(key + Keys.ENTER)
        if error:
            wait(browser, lambda words=error: by_id(browser, "key-error").text == words)
    wait(browser, lambda: by_id(browser, "state").text == "ready")
    wait(browser, lambda: by_id(browser, "chat-title").text == "Completion")
    for count, words in enumerate(("My dear", "Indeed?"), 1):
        say(browser, words)
        wait(browser, lambda count=count: len(answers(browser)) == count)
    browser.refresh()
    wait(browser, lambda: by_id(browser, "state").text == "ready")
    assert not by_id(browser, "key-dialog").get_attribute("open"), "the tab keeps the key"
    asked = [line for line in server.requests() if line["path"] == "/v1/completions"]
    assert [line["status"] for line in asked] == [200, 200]
    server.process.terminate()
    server.process.wait(30)
    wait(browser, lambda: by_id(browser, "state").text == "no answer")
