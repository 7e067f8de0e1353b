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

export function cells(row, kinds) {
  return kinds.map((kind) => row.appendChild(make("td", "", kind)));
}
