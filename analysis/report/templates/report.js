// Sorts and filters the tables, stacks the cells of wide ones on phones, and searches the collapsed part. Without this
// script the page shows the same content.
(() => {
  const MISSING = "–";
  const cell = (row, column) => row.cells[column].textContent.trim();
  const first = (text) => parseFloat(text.replace(/,/g, "").replace("−", "-"));
  const words = new Intl.Collator("en", { numeric: true });

  function compared(a, b, numeric) {
    if (a === MISSING || b === MISSING) return 0;
    return numeric ? first(a) - first(b) || words.compare(a, b) : words.compare(a, b);
  }

  function sortable(table) {
    const body = table.tBodies[0];
    const given = [...body.rows];
    const heads = [...table.tHead.rows[0].cells];
    heads.forEach((head, column) => {
      const button = document.createElement("button");
      button.type = "button";
      button.title = "sort by this column";
      button.append(...head.childNodes);
      head.append(button);
      head.setAttribute("aria-sort", "none");
      button.addEventListener("click", () => {
        const next = { none: "ascending", ascending: "descending", descending: "none" }[head.getAttribute("aria-sort")];
        heads.forEach((other) => other.setAttribute("aria-sort", other === head ? next : "none"));
        const sign = next === "descending" ? -1 : 1;
        const numeric = body.rows[0].cells[column].classList.contains("number");
        const missing = (row) => cell(row, column) === MISSING; // last in either direction
        const ordered = [...given];
        if (next !== "none") {
          ordered.sort((a, b) => missing(a) - missing(b) || sign * compared(cell(a, column), cell(b, column), numeric));
        }
        body.append(...ordered);
        table.classList.toggle("sorted", next !== "none");
      });
    });
  }

  function filterable(table) {
    const rows = [...table.tBodies[0].rows];
    if (rows.length <= 8) return;
    const region = table.closest(".scroll");
    const bar = document.createElement("p");
    bar.className = "filter";
    const input = document.createElement("input");
    input.type = "search";
    input.placeholder = "filter rows";
    input.setAttribute("aria-label", `Filter rows of: ${region.getAttribute("aria-label")}`);
    const count = document.createElement("output");
    bar.append(input, count);
    region.before(bar);
    const texts = new Map(rows.map((row) => [row, [...row.cells].map((c) => c.textContent.trim()).join(" ").toLowerCase()]));
    input.addEventListener("input", () => {
      const wanted = input.value.toLowerCase().split(/\s+/).filter(Boolean);
      for (const row of rows) row.hidden = !wanted.every((word) => texts.get(row).includes(word));
      const shown = rows.filter((row) => !row.hidden).length;
      count.textContent = wanted.length ? `${shown} of ${rows.length} rows` : "";
    });
  }

  // On a narrow page, a table that is wider than the page shows each row as a list of headers and cells. The tables of
  // the visible part do so on a page of medium width as well, since there each of their columns counts.
  const narrow = matchMedia("(max-width: 700px)");
  const medium = matchMedia("screen and (max-width: 1000px)");
  const widths = new WeakMap();
  function stack(region) {
    const table = region.querySelector("table");
    table.classList.remove("stacked");
    const page = region.closest(".question") ? medium : narrow;
    table.classList.toggle("stacked", page.matches && table.offsetWidth > region.clientWidth);
  }
  const stacking = new ResizeObserver((entries) => {
    for (const { target, contentRect } of entries) {
      if (widths.get(target) === contentRect.width) continue; // stacking changes its height only
      widths.set(target, contentRect.width);
      requestAnimationFrame(() => stack(target));
    }
  });

  function stackable(table) {
    const names = [...table.tHead.rows[0].cells].map((head) => head.textContent.trim());
    for (const row of table.tBodies[0].rows) {
      [...row.cells].forEach((part, column) => {
        part.dataset.header = names[column];
        part.classList.toggle("missing", cell(row, column) === MISSING);
      });
    }
    stacking.observe(table.closest(".scroll"));
  }

  function searchable(box) {
    const input = document.getElementById("search");
    const count = document.getElementById("hits");
    const sections = [...box.children].filter((part) => part.tagName === "SECTION");
    const texts = new Map(sections.map((section) => [section, section.textContent.toLowerCase()]));
    input.addEventListener("input", () => {
      const wanted = input.value.toLowerCase().split(/\s+/).filter(Boolean);
      for (const section of sections) section.hidden = !wanted.every((word) => texts.get(section).includes(word));
      for (const link of box.querySelectorAll("nav a")) {
        const target = document.getElementById(link.hash.slice(1));
        link.parentElement.hidden = target !== null && target.closest("section[hidden]") !== null;
      }
      const shown = sections.filter((section) => !section.hidden).length;
      count.textContent = wanted.length ? `${shown} of ${sections.length} sections` : "";
    });
  }

  // Opens the collapsed part if the address points into it.
  function reveal() {
    const target = location.hash && document.getElementById(decodeURIComponent(location.hash.slice(1)));
    const box = target && target.closest("details");
    if (box && !box.open) {
      box.open = true;
      target.scrollIntoView();
    }
  }

  const box = document.getElementById("everything");
  if (box) searchable(box);
  addEventListener("hashchange", reveal);
  reveal();
  for (const table of document.querySelectorAll(".scroll table")) {
    sortable(table);
    filterable(table);
    stackable(table);
  }
})();
