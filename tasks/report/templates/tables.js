/* Tables sort by a click on a heading; those of more than four rows have a field that filters. */
"use strict";
function sortKey(text) {
  const number = text.replace(/,/g, "").match(/^[^\p{L}\d]*?([-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?)/u);
  return number ? Number(number[1]) : null;
}
function compareCells(a, b) {
  const [x, y] = [sortKey(a), sortKey(b)];
  if (x !== null && y !== null) return x - y;
  if (x !== null || y !== null) return x === null ? 1 : -1;
  return a.localeCompare(b);
}
function isEmpty(text) {
  return text === "" || text === "–";
}
function sortRows(rows, column, descending) {
  const text = (row) => row.cells[column].textContent.trim();
  return [...rows].sort((a, b) => {
    const [x, y] = [text(a), text(b)];
    if (isEmpty(x) || isEmpty(y)) return isEmpty(x) - isEmpty(y); // empty cells stay last
    return descending ? compareCells(y, x) : compareCells(x, y);
  });
}
function matches(text, wanted) {
  return wanted.toLowerCase().split(/\s+/).every((word) => text.toLowerCase().includes(word));
}
function enhance(table) {
  const body = table.tBodies[0];
  if (!body || body.rows.length < 2) return;
  [...table.tHead.rows[0].cells].forEach((head, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = head.textContent;
    head.replaceChildren(button);
    button.addEventListener("click", () => {
      const descending = head.getAttribute("aria-sort") === "ascending";
      for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", descending ? "descending" : "ascending");
      body.append(...sortRows(body.rows, column, descending));
    });
  });
  if (body.rows.length < 5) return;
  const filter = document.createElement("input");
  filter.type = "search";
  filter.placeholder = "Filter rows";
  filter.setAttribute("aria-label", "Filter rows");
  filter.addEventListener("input", () => {
    for (const row of body.rows) row.hidden = !matches(row.textContent, filter.value.trim());
  });
  (table.closest(".scroll") || table).before(filter);
}
if (typeof document === "undefined") {
  module.exports = { matches, sortRows };
} else {
  document.querySelectorAll("main table").forEach(enhance);
}
