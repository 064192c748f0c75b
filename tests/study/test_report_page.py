"""The page in a real browser: headless Chromium, driven by its own driver."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import Select

import fake_study
from coset.study.report.page import page
from coset.study.report.results import read

WINDOWS = [(width, scheme) for width in (400, 1400) for scheme in ("light", "dark")]


def _programs() -> tuple[str, str]:
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    driver = shutil.which("chromedriver")
    if browser is None or driver is None:
        reason = "the report's page is tested in Chromium, and chromium or chromedriver is not on PATH (Debian: chromium, chromium-driver)"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    return browser, driver


@pytest.fixture(scope="module")
def chrome(tmp_path_factory: pytest.TempPathFactory) -> Iterator[webdriver.Chrome]:
    browser, driver = _programs()
    options = webdriver.ChromeOptions()
    options.binary_location = browser
    flags = ["headless=new", "disable-gpu", "disable-background-networking", "disable-component-update", "disable-sync", "no-first-run"]
    if os.geteuid() == 0:
        flags.append("no-sandbox")
    for flag in (*flags, "disable-dev-shm-usage", f"user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    found = webdriver.Chrome(options=options, service=Service(driver))
    yield found
    found.quit()


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    return fake_study.study()


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory, document: dict[str, Any]) -> str:
    folder = tmp_path_factory.mktemp("study")
    (folder / "results.json").write_text(json.dumps(document))
    path = folder / "report.html"
    path.write_text(page(read(folder)))
    return path.as_uri()


def visit(chrome: webdriver.Chrome, address: str, width: int = 1400, scheme: str = "light", media: str = "screen") -> None:
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
    chrome.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    features = [{"name": "prefers-color-scheme", "value": scheme}, {"name": "prefers-reduced-motion", "value": "reduce"}]
    chrome.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": media, "features": features})
    chrome.get_log("browser")
    chrome.get(address)


@pytest.fixture
def wide(chrome: webdriver.Chrome, address: str) -> webdriver.Chrome:
    visit(chrome, address)
    return chrome


def luminance(colour: str) -> float:
    channels = [float(part) / 255 for part in colour[colour.index("(") + 1 : -1].split(",")[:3]]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def column(chrome: webdriver.Chrome, name: str) -> list[str]:
    script = "return [...document.querySelectorAll(`#main tbody td[data-matcher='${arguments[0]}']`)].map((c) => c.dataset.v)"
    return chrome.execute_script(script, name)


def head(chrome: webdriver.Chrome, name: str) -> WebElement:
    return chrome.find_element(By.CSS_SELECTOR, f"#main th[data-matcher='{name}']")


def into_view(chrome: webdriver.Chrome, node: WebElement) -> WebElement:
    chrome.execute_script("arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})", node)
    return node


@pytest.mark.parametrize(("width", "scheme"), WINDOWS)
def test_opens_without_an_error_and_draws_every_figure(chrome: webdriver.Chrome, address: str, width: int, scheme: str) -> None:
    visit(chrome, address, width, scheme)
    assert chrome.get_log("browser") == []
    sizes = chrome.execute_script(
        """return [...document.querySelectorAll(".plot svg")].map((svg) => {
             const box = svg.getBoundingClientRect();
             const marks = svg.querySelectorAll("polyline, polygon, circle:not(.ring)");
             return [box.width, box.height, marks.length, svg.getAttribute("aria-label").length];
           })"""
    )
    # Three encodings, loss, accuracy, training, sweep, dimensions, distance.
    assert len(sizes) == 9
    for across, down, marks, text in sizes:
        assert 240 < across <= width
        assert down > 180
        assert marks >= 3
        assert text > 40


@pytest.mark.parametrize(("width", "scheme"), WINDOWS)
def test_the_page_never_scrolls_sideways(chrome: webdriver.Chrome, address: str, width: int, scheme: str) -> None:
    visit(chrome, address, width, scheme)
    chrome.execute_script("document.querySelectorAll('details').forEach((d) => { d.open = true; })")
    wide, room = chrome.execute_script("return [document.documentElement.scrollWidth, document.documentElement.clientWidth]")
    assert wide <= room <= width
    sticking_out = chrome.execute_script(
        """return [...document.querySelectorAll("body *")].filter((node) => node.getBoundingClientRect().right > innerWidth + 1
             && !node.closest(".scroll, pre, .hidden")).map((node) => node.outerHTML.slice(0, 80))"""
    )
    assert sticking_out == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_contrast(chrome: webdriver.Chrome, address: str, scheme: str) -> None:
    visit(chrome, address, 1400, scheme)
    ground = chrome.execute_script("return getComputedStyle(document.body).backgroundColor")
    assert (luminance(ground) > 0.5) == (scheme == "light")
    texts = chrome.execute_script(
        """const ground = (node) => { for (; node; node = node.parentElement) {
             const colour = getComputedStyle(node).backgroundColor;
             if (colour !== "rgba(0, 0, 0, 0)") return colour; } };
           return ["p", ".quiet", "a", "#main thead th", "#main td", "#main td.best", "caption", "select", ".legend button",
                   "pre", "summary", "label"]
             .map((q) => document.querySelector(q)).map((n) => [getComputedStyle(n).color, ground(n)])
             .concat([[getComputedStyle(document.querySelector(".plot text")).fill, ground(document.body)]])"""
    )
    assert min(contrast(ink, behind) for ink, behind in texts) >= 4.5
    colours = chrome.execute_script(
        "return [...document.querySelectorAll('#main .swatch')].map((n) => getComputedStyle(n).backgroundColor)"
    )
    assert len(set(colours)) == 4
    assert min(contrast(colour, ground) for colour in colours) >= 3


def test_every_matcher_has_one_colour(wide: webdriver.Chrome) -> None:
    lines = wide.execute_script(
        "return [...document.querySelectorAll('.legend button')].map((b) => [b.textContent, b.querySelector('line').getAttribute('stroke')])"
    )
    assert len(set(map(tuple, lines))) == len({name for name, _ in lines}) == 4


def test_sorts_by_click_and_by_keyboard_with_missing_values_last(wide: webdriver.Chrome) -> None:
    before = column(wide, "learned")
    into_view(wide, head(wide, "learned")).find_element(By.TAG_NAME, "button").click()
    assert head(wide, "learned").get_attribute("aria-sort") == "ascending"
    after = column(wide, "learned")
    known = [float(value) for value in after if value]
    assert after != before
    assert known == sorted(known)
    assert after[-2:] == ["", ""]
    wide.switch_to.active_element.send_keys(Keys.ENTER)
    assert head(wide, "learned").get_attribute("aria-sort") == "descending"
    again = column(wide, "learned")
    assert [float(value) for value in again if value] == known[::-1]
    assert again[-2:] == ["", ""]
    wide.switch_to.active_element.send_keys(Keys.TAB)  # the next heading in the document is in another table
    button = head(wide, "naive").find_element(By.TAG_NAME, "button")
    wide.execute_script("arguments[0].focus()", button)
    button.send_keys(Keys.SPACE)
    assert head(wide, "naive").get_attribute("aria-sort") == "ascending"
    assert head(wide, "learned").get_attribute("aria-sort") == "none"


def test_scopes_sort_from_small_to_whole(wide: webdriver.Chrome) -> None:
    wide.find_elements(By.CSS_SELECTOR, "#main thead button")[3].click()
    shown = [cell.text for cell in wide.find_elements(By.CSS_SELECTOR, "#main tbody td:nth-child(4)")]
    assert list(dict.fromkeys(shown)) == ["first-attention", "all-attention", "first-layer", "whole"]


def test_filters_narrow_the_table(wide: webdriver.Chrome) -> None:
    def shown() -> int:
        return wide.execute_script("return [...document.querySelectorAll('#main tbody tr')].filter((r) => r.offsetHeight > 0).length")

    assert shown() == 41
    Select(wide.find_element(By.CSS_SELECTOR, "select[data-filter=scope]")).select_by_visible_text("whole")
    Select(wide.find_element(By.CSS_SELECTOR, "select[data-filter=encoding]")).select_by_visible_text("RoPE")
    assert shown() == 5
    assert wide.find_element(By.ID, "count").text == "5 of 41 settings shown"


def test_quantities_of_the_table(wide: webdriver.Chrome, document: dict[str, Any]) -> None:
    found = document["settings"][0]["matchers"]["two_stage"]
    cell = wide.find_element(By.CSS_SELECTOR, "#main tr[data-id=s000] td[data-matcher=two_stage]")
    assert cell.text.startswith(f"{found['percent_of_naive']:.2f} ± {found['percent_standard_error']:.2f}")
    Select(wide.find_element(By.ID, "quantity")).select_by_value("accuracy_barrier")
    assert cell.text == f"{100 * found['accuracy_barrier']['mean']:.1f} ± {100 * found['accuracy_barrier']['standard_error']:.1f}"
    assert "percentage points" in wide.find_element(By.CSS_SELECTOR, "#main caption").text
    assert head(wide, "naive").text.startswith("naive")
    assert "nats" not in head(wide, "naive").text


def test_a_matcher_is_hidden_everywhere_at_once(wide: webdriver.Chrome) -> None:
    def lines() -> int:
        return len(wide.find_elements(By.CSS_SELECTOR, "#loss polyline, #sweep-chart polyline"))

    assert lines() == 4 + 3
    button = next(b for b in wide.find_elements(By.CSS_SELECTOR, "#legend-one button") if b.text == "activations")
    into_view(wide, button).click()
    assert lines() == 3 + 2
    assert wide.switch_to.active_element.text == "activations"
    pressed = [b.get_attribute("aria-pressed") for b in wide.find_elements(By.CSS_SELECTOR, ".legend button") if b.text == "activations"]
    assert set(pressed) == {"false"}
    wide.switch_to.active_element.send_keys(Keys.ENTER)
    assert lines() == 4 + 3


def test_pointer_and_arrow_keys_read_values(wide: webdriver.Chrome, document: dict[str, Any]) -> None:
    plot = into_view(wide, wide.find_element(By.CSS_SELECTOR, "#loss .plot"))
    pairs = document["settings"][0]["matchers"]["naive"]["pairs"]
    Select(wide.find_element(By.ID, "choose")).select_by_value("s000")
    plot = wide.find_element(By.CSS_SELECTOR, "#loss .plot")
    svg = plot.find_element(By.TAG_NAME, "svg").rect
    left = wide.execute_script("return Number(document.querySelector('#loss .axis').getAttribute('x1'))")
    middle = left + (svg["width"] - left - 12) / 2
    ActionChains(wide).move_to_element_with_offset(plot, int(middle - svg["width"] / 2), 0).perform()
    tip = plot.find_element(By.CSS_SELECTOR, ".tip")
    assert tip.is_displayed()
    assert "t: 0.5" in tip.text
    assert f"naive {fmean(pair['loss'][12] for pair in pairs):.2f} ±" in tip.text
    ActionChains(wide).move_to_element(wide.find_element(By.TAG_NAME, "h1")).perform()
    wide.execute_script("arguments[0].focus()", plot)
    plot.send_keys(Keys.ARROW_LEFT)
    plot.send_keys(Keys.ARROW_LEFT)
    assert f"t: {23 / 24:.3f}" in tip.text
    assert wide.find_element(By.CSS_SELECTOR, "#loss [aria-live]").get_attribute("textContent") == tip.text
    plot.send_keys(Keys.ESCAPE)
    assert not tip.is_displayed()


def test_numbers_of_a_figure_are_a_table(wide: webdriver.Chrome) -> None:
    summary = into_view(wide, wide.find_element(By.CSS_SELECTOR, "#loss details summary"))
    summary.click()
    deadline = time.monotonic() + 5
    while not (found := wide.find_elements(By.CSS_SELECTOR, "#loss details tbody tr")) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert len(found) == 25 * 4


def test_a_row_leads_to_its_curves_and_pairs(wide: webdriver.Chrome) -> None:
    into_view(wide, wide.find_element(By.CSS_SELECTOR, "#main tr[data-id=s011] a")).click()
    assert wide.find_element(By.ID, "chosen").text == "digits · ViT · RoPE · whole · width 64"
    assert Select(wide.find_element(By.ID, "choose")).first_selected_option.get_attribute("value") == "s011"
    into_view(wide, wide.find_element(By.ID, "each")).click()
    assert len(wide.find_elements(By.CSS_SELECTOR, "#loss polyline")) == 4 * 3


def test_hostile_names_stay_text(wide: webdriver.Chrome) -> None:
    Select(wide.find_element(By.ID, "task")).select_by_index(2)
    Select(wide.find_element(By.ID, "choose")).select_by_index(40)
    assert len(wide.find_elements(By.TAG_NAME, "script")) == 2
    assert wide.find_elements(By.CSS_SELECTOR, "img, h1 b") == []
    assert "<script>alert(1)</script>" in wide.find_element(By.ID, "chosen").text
    assert wide.get_log("browser") == []


def test_asks_for_nothing(wide: webdriver.Chrome) -> None:
    assert wide.execute_script("return performance.getEntriesByType('resource').filter((e) => !e.name.startsWith('data:')).length") == 0


def test_named_for_assistive_technology(wide: webdriver.Chrome) -> None:
    wide.execute_script("document.querySelectorAll('details').forEach((d) => { d.open = true; })")
    without = wide.execute_script(
        """return [...document.querySelectorAll("th:not([scope]), .plot svg:not([role=img][aria-label]), select, input," +
             ".scroll:not([tabindex][aria-label])")]
             .filter((node) => !node.closest("label")).map((node) => node.outerHTML.slice(0, 80))"""
    )
    assert without == []
    levels = wide.execute_script("return [...document.querySelectorAll('h1, h2, h3')].map((h) => Number(h.tagName[1]))")
    assert levels[0] == 1
    assert all(b - a <= 1 for a, b in itertools.pairwise(levels))


def test_charts_follow_the_window(wide: webdriver.Chrome) -> None:
    wide.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", {"width": 500, "height": 900, "deviceScaleFactor": 1, "mobile": False})
    deadline = time.monotonic() + 5
    script = "return document.querySelector('#loss svg').viewBox.baseVal.width"
    while (width := wide.execute_script(script)) > 500 and time.monotonic() < deadline:
        time.sleep(0.02)
    assert width <= 500


def test_print_shows_everything_on_white(chrome: webdriver.Chrome, address: str) -> None:
    visit(chrome, address, 720, "dark", "print")
    chrome.execute_script("dispatchEvent(new Event('beforeprint'))")
    assert luminance(chrome.execute_script("return getComputedStyle(document.body).color")) < 0.1
    assert chrome.execute_script("return [...document.querySelectorAll('#reproduce details')].every((d) => d.open)")
    assert chrome.find_element(By.ID, "legend-one").is_displayed()
    assert not chrome.find_element(By.ID, "choose").is_displayed()
    assert chrome.execute_script("return document.documentElement.scrollWidth") <= 720
    chrome.execute_script("dispatchEvent(new Event('afterprint'))")
    assert not chrome.execute_script("return [...document.querySelectorAll('#reproduce details')].every((d) => d.open)")


def test_tables_need_no_script(chrome: webdriver.Chrome, address: str) -> None:
    chrome.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    try:
        visit(chrome, address)
        assert "±" in chrome.find_element(By.CSS_SELECTOR, "#main tbody td.best").text
        assert not chrome.find_element(By.ID, "setting").is_displayed()
        assert "need JavaScript" in chrome.find_element(By.TAG_NAME, "main").text
    finally:
        chrome.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})


def test_a_study_of_one_setting_and_one_pair_opens(chrome: webdriver.Chrome, tmp_path: Path, document: dict[str, Any]) -> None:
    single = document | {"settings": [fake_study.setting(0, "digits", "vit", "rope", "whole", seeds=2)], "failures": []}
    (tmp_path / "results.json").write_text(json.dumps(single))
    path = tmp_path / "report.html"
    path.write_text(page(read(tmp_path)))
    visit(chrome, path.as_uri(), 400)
    assert chrome.get_log("browser") == []
    assert len(chrome.find_elements(By.CSS_SELECTOR, ".plot svg")) == 6
