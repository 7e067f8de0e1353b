/* Elements. Text is put in as text: nothing of what comes from an engine is read as HTML. */

export const $ = (id) => document.getElementById(id);

export function make(tag, text, className) {
  const element = document.createElement(tag);
  if (text !== undefined && text !== null) element.textContent = text;
  if (className) element.className = className;
  return element;
}

/* Only what has changed is written: everything else would be laid out, and read out, again. */
export function put(element, text, className) {
  if (element.textContent !== text) element.textContent = text;
  if (className !== undefined && element.className !== className) element.className = className;
}

/* Rows by a key, which stay as long as their key does: whoever has one in focus, or hears it read, keeps it. */
export class Rows {
  constructor(body, makeRow) {
    this.body = body;
    this.makeRow = makeRow;
    this.rows = new Map();
  }

  sync(entries, keyOf) {
    const before = this.rows;
    this.rows = new Map();
    let place = this.body.firstElementChild;
    for (const entry of entries) {
      const key = keyOf(entry);
      const row = before.get(key) || this.makeRow(entry);
      before.delete(key);
      row.update(entry);
      this.rows.set(key, row);
      for (const element of row.elements) {
        if (element === place) place = place.nextElementSibling;
        else this.body.insertBefore(element, place);
      }
    }
    for (const row of before.values()) for (const element of row.elements) element.remove();
    const box = this.body.closest(".scroll");
    box.hidden = !entries.length;
    if (box.nextElementSibling) box.nextElementSibling.hidden = !box.hidden;
  }

  each(visit) { for (const row of this.rows.values()) visit(row); }
}

/* The cells of a row; each has its label where the row is a card. */
export function cells(row, kinds, labels) {
  return kinds.map((kind, index) => labelled(row.appendChild(make("td", "", kind)), labels[index]));
}

export function labelled(cell, label) {
  if (label) cell.dataset.label = label;
  return cell;
}

/* Said in full: on a phone the rows are cards, and a browser may then take them for no table. */
const ROLES = { TABLE: "table", THEAD: "rowgroup", TBODY: "rowgroup", TR: "row", TD: "cell" };
export function sayRoles(top) {
  for (const element of [top, ...top.querySelectorAll("thead, tbody, tr, th, td")]) {
    if (element.closest(".cards") !== top.closest(".cards")) continue;
    element.setAttribute("role", ROLES[element.tagName] || (element.scope === "row" ? "rowheader" : "columnheader"));
  }
}
for (const table of document.querySelectorAll(".cards")) sayRoles(table);
