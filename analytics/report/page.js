"use strict";
// Draws each plot when it comes into view, in the page's colours, and again when these change.
(() => {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const touched = matchMedia("(pointer: coarse)").matches; // there a drag scrolls the page
  const drawn = new Set();
  const styles = getComputedStyle(document.documentElement);
  const colour = (name) => styles.getPropertyValue(name).trim();

  const axis = (own) => {
    const line = colour("--line");
    return { ...own, gridcolor: line, linecolor: line, zerolinecolor: line, tickcolor: line };
  };
  const coloured = (trace) => {
    const own = colour(`--c${trace.meta}`);
    const line = trace.type === "bar" ? {} : { line: { ...trace.line, color: own } };
    return { ...trace, ...line, marker: { ...trace.marker, color: own } };
  };

  const draw = (plot) => {
    const figure = JSON.parse(plot.nextElementSibling.textContent);
    const text = colour("--text");
    const layout = {
      ...figure.layout,
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      font: { ...figure.layout.font, color: text },
      hoverlabel: { ...figure.layout.hoverlabel, bgcolor: colour("--raised"), bordercolor: colour("--line") },
      xaxis: axis(figure.layout.xaxis),
      yaxis: axis(figure.layout.yaxis),
      dragmode: touched ? false : "zoom",
    };
    const hidden = new Set(plot.dataset.hidden ? plot.dataset.hidden.split(" ") : []);
    const data = figure.data.map((trace, place) => ({ ...coloured(trace), visible: !hidden.has(String(place)) }));
    Plotly.react(plot, data, layout, { displayModeBar: false, responsive: true });
    drawn.add(plot);
  };

  const watcher = new IntersectionObserver(
    (entries) => {
      for (const entry of entries) {
        if (entry.isIntersecting) {
          watcher.unobserve(entry.target);
          draw(entry.target);
        }
      }
    },
    { rootMargin: "600px" },
  );
  const plots = document.querySelectorAll(".plot");
  plots.forEach((plot) => watcher.observe(plot));
  dark.addEventListener("change", () => drawn.forEach(draw));
  addEventListener("beforeprint", () => plots.forEach((plot) => drawn.has(plot) || draw(plot)));

  document.querySelectorAll(".legend button").forEach((button) =>
    button.addEventListener("click", () => {
      const shown = button.getAttribute("aria-pressed") === "false";
      button.setAttribute("aria-pressed", String(shown));
      const legend = button.closest(".legend");
      const off = [...legend.querySelectorAll("button")].flatMap((one, place) =>
        one.getAttribute("aria-pressed") === "false" ? [place] : [],
      );
      const plot = legend.closest("figure").querySelector(".plot");
      plot.dataset.hidden = off.join(" ");
      draw(plot);
    }),
  );
})();
