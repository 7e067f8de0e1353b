/* Explanations, on hover and on focus, for people who never heard of GC generations. */

import { $, put } from "./dom.js";

const TIPS = {
  policy: "What Python's garbage collector may do in this engine.\noff: it works as usual, and may stop a process at any moment.\nfreeze: no automatic full collection. For benchmarks.\nbudget: automatic collections are kept to a few milliseconds. For serving.",
  since: "Since when the policy has been in force.",
  until: "A policy is a lease: it ends by itself at this time, in every process, even if this sidecar is gone. Freeze again to renew it.",
  owner: "Whose policy it is. Nobody else may change or end it, except by force.",
  coverage: "In how many of the engine's processes the policy is proven to be in force. All have to: while one stands still, the others wait for it.",
  transport: "How the sidecar reaches the engine. plugin and dev: through the engine's own port. board: through the shared directory alone.",
  process: "Every process of the engine: what it does, its data-parallel rank (dp) where there are several, and its rank.",
  state: "Whether the process does what was asked for, by its own word.",
  collecting: "Whether it stands still at this moment, because a full collection is running in it.",
  last: "How long its newest full collection took. Meanwhile it did nothing else. A full collection walks every object that the process has: the more, the longer.",
  longest: "Its longest full collection since it started.",
  memory: "What it has allocated itself (anonymous memory), without files and what it shares with others.",
  growth: "By how much its memory has grown since the policy was entered. Garbage that refers to itself waits until maintain or restore; what they free is used again, and seldom returned to the system.",
  pid: "Its number in its own container.",
  auto: "Python itself found that it was time. These are the pauses that spoil a measurement; freeze holds them off. Under a budget, those within it are drawn like young ones.",
  asked: "Full collections that freeze, budget, maintain or restore run at the moment when somebody asks for them.",
  explicit: "Some code in the engine called gc.collect(). vLLM does so while it starts.",
  young: "A quick collection of new objects alone, shown from 1 ms on.",
  window: "A stretch of time that somebody measured. Clean: no pause in it was over its limits, and that is known for every process.",
  open: "A window that has not been closed yet, or an operation that goes on: drawn hollow.",
  failed: "An operation that was refused, failed, or was not done by every process. Last operations, below, say why.",
};

const GAP = 6;

export const tip = {
  element: $("tip"),
  owner: null,
  /* Of a point in a chart: below it, where there is room. */
  show(text, x, y) {
    this.hide();
    const { width, height } = this.fill(text);
    const isLow = y + 18 + height > document.documentElement.clientHeight;
    this.place(x + 8, isLow ? y - height - 12 : y + 18, width);
  },
  /* Of a word: above it, since what it explains is below. Without room there, below that, or beside the column. */
  explain(button) {
    if (this.owner !== button) this.hide();
    this.owner = button;
    button.setAttribute("aria-describedby", "tip");
    const { width, height } = this.fill(TIPS[button.dataset.tip]);
    const box = button.getBoundingClientRect();
    const around = button.closest("div, li, th, h2").getBoundingClientRect();
    const { clientWidth, clientHeight } = document.documentElement;
    this.element.hidden = box.bottom < 0 || box.top > clientHeight;
    if (box.top - GAP - height >= 0) return this.place(box.left, box.top - GAP - height, width);
    if (!button.closest("th")) return this.place(box.left, around.bottom + GAP, width);
    const isRight = around.right + GAP + width <= clientWidth;
    this.place(isRight ? around.right + GAP : around.left - GAP - width, box.top, width);
  },
  fill(text) {
    put(this.element, text);
    this.element.hidden = false;
    // At an edge it would be narrower.
    this.element.style.left = "0";
    return this.element.getBoundingClientRect();
  },
  place(left, top, width) {
    this.element.style.left = `${Math.max(4, Math.min(left, document.documentElement.clientWidth - width - 8))}px`;
    this.element.style.top = `${Math.max(4, top)}px`;
  },
  hide() {
    this.element.hidden = true;
    this.owner?.removeAttribute("aria-describedby");
    this.owner = null;
  },
};
for (const button of document.querySelectorAll("[data-tip]")) {
  for (const name of ["pointerenter", "focus", "click"]) button.addEventListener(name, () => tip.explain(button));
  for (const name of ["pointerleave", "blur"]) button.addEventListener(name, () => tip.hide());
}
document.addEventListener("keydown", (event) => { if (event.key === "Escape") tip.hide(); });
// The focus itself scrolls the page: what is focused stays explained, where it then is.
document.addEventListener("scroll", () => {
  if (tip.owner && tip.owner === document.activeElement) tip.explain(tip.owner);
  else tip.hide();
}, { passive: true, capture: true });
