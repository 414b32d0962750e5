"use strict";
(() => {
  const data = JSON.parse(document.getElementById("what-if-data").textContent);
  const panel = document.getElementById("what-if-panel");
  const menus = [...panel.querySelectorAll("select")];
  const cells = [...panel.querySelectorAll("dd")];
  const command = panel.querySelector("pre");

  const isChosen = (row, menuCount) =>
    menus.slice(0, menuCount).every((menu, place) => menu.value === row[place]);

  // Each menu offers what the table has with the choices before it, and keeps its own where it can.
  const fill = (first, wanted) => {
    for (let place = first; place < menus.length; place += 1) {
      const rows = data.rows.filter((row) => isChosen(row, place));
      const values = [...new Set(rows.map((row) => row[place]))];
      menus[place].replaceChildren(...values.map((value) => new Option(value, value)));
      menus[place].value = values.includes(wanted[place]) ? wanted[place] : values[0];
    }
  };

  const show = () => {
    const row = data.rows.find((one) => isChosen(one, menus.length));
    cells.forEach((cell, place) => { cell.textContent = row[menus.length + place]; });
    const words = row[row.length - 1];
    command.hidden = words === null;
    command.firstChild.textContent = `${data.command} ${words}`.trim();
  };

  menus.forEach((menu, place) => {
    menu.addEventListener("change", () => {
      fill(place + 1, menus.map((one) => one.value));
      show();
    });
  });
  fill(0, data.rows[data.running]);
  show();
  panel.hidden = false;
  document.getElementById("what-if-rows").open = false;
})();
