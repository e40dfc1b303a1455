"use strict";
// before the first paint, so that a chosen theme does not flash
window.quantBench = {};
try {
  const chosen = localStorage.getItem("quant-bench-theme");
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
} catch {
  // a page without storage follows the system
}
