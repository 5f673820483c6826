"use strict";
// Draws each figure when it comes near the screen: a page with many figures shows its words first.
(function () {
  const places = [...document.querySelectorAll(".figure")];
  const options = { responsive: true, displaylogo: false, displayModeBar: false };
  function draw(place) {
    if (place.dataset.drawn) return;
    place.dataset.drawn = "yes";
    if (typeof Plotly === "undefined") {
      place.textContent = "This figure needs plotly.js, which could not be loaded; its numbers are in the table below.";
      return;
    }
    const figure = JSON.parse(document.getElementById(place.id + "-data").textContent);
    Plotly.newPlot(place, figure.data, figure.layout, options);
  }
  function start() {
    if (!("IntersectionObserver" in window)) { places.forEach(draw); return; }
    const watcher = new IntersectionObserver(
      (entries) => entries.filter((entry) => entry.isIntersecting).forEach((entry) => { watcher.unobserve(entry.target); draw(entry.target); }),
      { rootMargin: "300px" },
    );
    places.forEach((place) => watcher.observe(place));
  }
  window.addEventListener("beforeprint", () => places.forEach(draw));
  // After a first paint: plotting must not delay it.
  requestAnimationFrame(() => setTimeout(start, 0));
})();
