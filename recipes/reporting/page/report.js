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

  // Keep the part of the run that is shown when the axis changes: the runs' own steps decide.
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
    const poll = async () => {
      let version = settings.version;
      try {
        const answer = await fetch("version", { cache: "no-store" });
        if (answer.ok) version = await answer.text();
      } catch { return; } // the run has ended, and with it the server
      if (version !== settings.version) location.reload();
      else setTimeout(poll, settings.seconds * 1000);
    };
    setTimeout(poll, settings.seconds * 1000);
  }
})();
