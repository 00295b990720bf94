// Sorts and filters the table of techniques. Without it, the page shows the plain table.
"use strict";

function setUp(box) {
  const table = box.querySelector("table");
  if (!table || box.dataset.ready) return;
  box.dataset.ready = "yes";
  const heads = Array.from(table.tHead.rows[0].cells);
  const body = table.tBodies[0];
  const rows = Array.from(body.rows);
  const text = (row, column) => row.cells[column].textContent.trim();
  const titles = heads.map((head) => head.textContent.trim());
  for (const row of rows) Array.from(row.cells).forEach((cell, column) => (cell.dataset.title = titles[column]));

  const bar = document.createElement("div");
  bar.className = "choose-filters";
  const search = document.createElement("input");
  search.type = "search";
  search.placeholder = "Search";
  search.setAttribute("aria-label", "Search techniques");
  bar.append(search);
  const selects = [];
  for (const title of box.dataset.filter.split(",")) {
    const column = titles.indexOf(title);
    if (column < 0) continue;
    const values = new Set(rows.flatMap((row) => text(row, column).split(", ")));
    const select = document.createElement("select");
    select.setAttribute("aria-label", title);
    select.add(new Option(title + ": all", ""));
    for (const value of Array.from(values).sort()) select.add(new Option(value, value));
    selects.push([select, column]);
    bar.append(select);
  }
  const count = document.createElement("span");
  count.setAttribute("role", "status");
  bar.append(count);
  box.before(bar);

  function filter() {
    const word = search.value.toLowerCase();
    let shown = 0;
    for (const row of rows) {
      const fits = selects.every(([select, column]) => !select.value || text(row, column).split(", ").includes(select.value));
      row.hidden = !(fits && row.textContent.toLowerCase().includes(word));
      shown += row.hidden ? 0 : 1;
    }
    count.textContent = shown + " of " + rows.length;
  }
  for (const part of [search, ...selects.map((one) => one[0])]) part.addEventListener("input", filter);

  heads.forEach((head, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const down = head.getAttribute("aria-sort") === "ascending";
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const order = (a, b) => text(a, column).localeCompare(text(b, column), "en", { numeric: true });
      rows.sort((a, b) => (down ? order(b, a) : order(a, b)));
      body.append(...rows);
    });
  });
  filter();
}

function setUpAll() {
  document.querySelectorAll(".choose").forEach(setUp);
}
if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", setUpAll);
else setUpAll();
