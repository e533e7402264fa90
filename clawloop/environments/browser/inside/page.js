// What pages do without asking their site: tabs, dialogs, steps, searching, sorting, counting, unlocking.
"use strict";
const all = (selector, within = document) => [...within.querySelectorAll(selector)];
const by = (id) => document.getElementById(id);
const on = (selector, type, handler) => all(selector).forEach((node) => node.addEventListener(type, () => handler(node)));

on("[role=tab]", "click", (chosen) => {
  for (const tab of all("[role=tab]")) {
    tab.setAttribute("aria-selected", String(tab === chosen));
    by(tab.getAttribute("aria-controls")).hidden = tab !== chosen;
  }
});
on("[data-opens]", "click", (button) => by(button.dataset.opens).showModal());
on("[data-closes]", "click", (button) => by(button.dataset.closes).close());
on("[data-shows]", "click", (button) => {
  button.closest("fieldset").hidden = true;
  by(button.dataset.shows).hidden = false;
});
on("[data-finds]", "click", (button) => {
  const words = all("input", button.parentElement)[0].value.trim().toLowerCase();
  for (const item of all("li", by(button.dataset.finds))) {
    item.hidden = words === "" || !item.textContent.toLowerCase().includes(words);
  }
});
on("[data-adds]", "click", (button) => {
  const field = all("input", button.parentElement)[0];
  field.value = String(Math.max(0, Number(field.value) + Number(button.dataset.adds)));
});
on("[data-unlocks]", "scroll", (box) => {
  if (box.scrollTop + box.clientHeight >= box.scrollHeight - 2) by(box.dataset.unlocks).disabled = false;
});
on("th button", "click", (button) => {
  const column = button.closest("th").cellIndex;
  const falling = button.dataset.order === "rising";
  for (const other of all("th button")) delete other.dataset.order;
  button.dataset.order = falling ? "falling" : "rising";
  const rows = all("tbody tr");
  const order = (a, b) => {
    const [one, two] = [a, b].map((row) => row.cells[column].textContent);
    return one.localeCompare(two, "en", { numeric: true }) * (falling ? -1 : 1);
  };
  rows[0].parentElement.append(...rows.sort(order));
});
