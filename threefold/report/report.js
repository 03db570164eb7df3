"use strict";
// Draws the figures, switches the x axis, hides runs, and reloads the page while it is served.
(async () => {
  const read = (id) => JSON.parse(document.getElementById(id).textContent);
  const settings = read("settings"); // axes, figures, version
  const data = read("figures-data");
  const stored = (() => {
    try { return JSON.parse(sessionStorage.getItem("report")) || {}; } catch { return {}; }
  })();
  const state = { axis: "step", events: true, abandoned: true, hidden: [], zoom: null, top: 0, ...stored };
  if (!(state.axis in settings.axes)) state.axis = "step";

  if (data) {
    const item = { docid: "report", roots: settings.roots, root_ids: Object.keys(settings.roots) };
    await Bokeh.embed.embed_items({ report: data }, [item]);
  }
  const report = data ? Bokeh.documents[Bokeh.documents.length - 1] : null;
  const figures = report ? report.roots() : [];
  const range = figures.length ? figures[0].x_range : null;

  const visible = ([run, role]) => {
    if (run >= 0 && state.hidden.includes(run)) return false;
    if (role === "abandoned") return state.abandoned;
    return state.events || !["mark", "turn"].includes(role);
  };

  // Show the runs and the x axis that the controls select; `zoom` is [start, end] or null for all.
  const apply = (zoom) => {
    const axis = settings.axes[state.axis];
    for (const figure of figures) {
      for (const renderer of figure.renderers) {
        if (renderer.glyph.x && renderer.glyph.x.field !== state.axis) {
          renderer.glyph.x = { field: state.axis };
        }
        renderer.visible = visible(renderer.tags);
      }
      for (const below of figure.below) if ("axis_label" in below) below.axis_label = axis.label;
    }
    if (range) {
      range.setv({ start: zoom ? zoom[0] : axis.start, end: zoom ? zoom[1] : axis.end,
                   reset_start: axis.start, reset_end: axis.end });
    }
  };

  const remember = () => {
    const axis = settings.axes[state.axis];
    const whole = !range || (range.start === axis.start && range.end === axis.end);
    state.zoom = whole ? null : [range.start, range.end];
    state.top = window.scrollY;
    try { sessionStorage.setItem("report", JSON.stringify(state)); } catch { /* private window */ }
  };

  // Another x axis shows the whole runs, because a zoom in one unit means nothing in another.
  for (const input of document.querySelectorAll("input[name=axis]")) {
    input.checked = input.value === state.axis;
    input.addEventListener("change", () => { state.axis = input.value; apply(null); });
  }
  for (const name of ["events", "abandoned"]) {
    const box = document.getElementById(name);
    if (!box) continue;
    box.checked = state[name];
    box.addEventListener("change", () => { state[name] = box.checked; apply(zoomNow()); });
  }
  for (const box of document.querySelectorAll("input.run")) {
    const run = Number(box.value);
    box.checked = !state.hidden.includes(run);
    box.addEventListener("change", () => {
      state.hidden = state.hidden.filter((each) => each !== run);
      if (!box.checked) state.hidden.push(run);
      apply(zoomNow());
    });
  }
  // The text box at the mouse: the value of each curve at the nearest step, and the events there.
  const tip = document.getElementById("tip");
  const number = (value) => Math.abs(value) >= 1000
    ? value.toLocaleString("en", { maximumFractionDigits: 0 })
    : String(Number(value.toPrecision(5)));

  // Index of the element of an increasing array that is nearest to x; -1 if none is a number.
  const nearest = (xs, x) => {
    let low = 0, high = xs.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (xs[middle] < x) low = middle; else high = middle;
    }
    const best = Math.abs(xs[low] - x) < Math.abs(xs[high] - x) ? low : high;
    return Number.isFinite(xs[best]) ? best : -1;
  };

  const readings = (figure, x, reach) => {
    const curves = [], events = [];
    for (const renderer of figure.renderers) {
      if (!renderer.visible) continue;
      const [run, role] = renderer.tags, source = renderer.data_source;
      const xs = source.get_column(state.axis), steps = source.get_column("step");
      if (role === "kept" && renderer.name) {
        const place = nearest(xs, x);
        if (place < 0 || x > xs[xs.length - 1] + reach) continue;
        const colour = renderer.glyph.line_color.value;
        curves.push({ colour, name: renderer.name, step: steps[place],
                      value: source.get_column("y")[place] });
      } else if (role === "mark" || role === "lane") {
        for (let place = 0; place < xs.length; place += 1) {
          if (Math.abs(xs[place] - x) > reach) continue;
          const [kind, text, name] = ["kind", "text", "run"].map((key) => source.get_column(key)[place]);
          events.push({ colour: settings.colours[run], step: steps[place],
                        name: name ? `${kind}, ${name}` : kind, value: text });
        }
      }
    }
    return { curves, events };
  };

  const add = (parent, kind, text, colour) => {
    const element = parent.appendChild(document.createElement(kind));
    element.textContent = text;
    if (colour) element.style.color = colour;
    return element;
  };

  const show = (figure, event) => {
    const view = Bokeh.index.get_one(figure), box = view.el.getBoundingClientRect();
    const [left, top] = [event.clientX - box.left, event.clientY - box.top];
    tip.hidden = true;
    if (!view.frame.bbox.contains(left, top) || event.buttons) return;
    const x = view.frame.x_scale.invert(left);
    const { curves, events } = readings(figure, x, Math.abs(view.frame.x_scale.invert(left + 7) - x));
    if (!curves.length && !events.length) return;
    tip.replaceChildren();
    const step = (curves[0] || events[0]).step;
    add(tip, "b", `step ${step.toLocaleString("en")}`);
    for (const { colour, name, value, step: own } of [...curves, ...events]) {
      const row = add(tip, "div", "");
      add(row, "span", "\u25A0 ", colour);
      add(row, "span", `${name}: `);
      if (typeof value === "number") add(row, "b", number(value)); else add(row, "span", value);
      if (own !== step) add(row, "i", ` step ${own.toLocaleString("en")}`);
    }
    tip.hidden = false;
    const flip = event.clientX + 18 + tip.offsetWidth > innerWidth;
    tip.style.left = `${flip ? event.clientX - 14 - tip.offsetWidth : event.clientX + 18}px`;
    tip.style.top = `${Math.max(4, Math.min(event.clientY + 14, innerHeight - tip.offsetHeight - 4))}px`;
  };

  for (const figure of figures) {
    const element = document.getElementById(settings.roots[figure.id]);
    element.addEventListener("mousemove", (event) => show(figure, event));
    element.addEventListener("mouseleave", () => { tip.hidden = true; });
  }

  const zoomNow = () => (range ? [range.start, range.end] : null);
  document.getElementById("reset").addEventListener("click", () => {
    for (const figure of figures) figure.reset.emit();
    apply(null);
  });

  apply(state.zoom);
  if (state.top) window.scrollTo(0, state.top);
  document.body.dataset.ready = "yes";

  if (settings.version) {
    addEventListener("pagehide", remember);
    let lost = 0; // seconds without an answer
    const poll = async () => {
      let version = settings.version;
      try {
        const answer = await fetch("version", { cache: "no-store" });
        if (answer.ok) version = await answer.text();
        lost = 0;
      } catch {
        lost += settings.seconds;
        if (lost > 60) return; // the run has ended, and with it the server
      }
      if (version !== settings.version) location.reload();
      else setTimeout(poll, settings.seconds * 1000);
    };
    setTimeout(poll, settings.seconds * 1000);
  }
})();
