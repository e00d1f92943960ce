// Sets the chosen theme before the first paint. "auto" follows the system.
"use strict";
try {
  document.documentElement.dataset.theme = localStorage.getItem("thermocline.theme") || "auto";
} catch {
  document.documentElement.dataset.theme = "auto";
}
