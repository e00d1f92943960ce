// Before the first paint: the theme that was chosen here, if one was. "auto" follows the system.
"use strict";
try {
  document.documentElement.dataset.theme = localStorage.getItem("thermocline.theme") || "auto";
} catch {
  document.documentElement.dataset.theme = "auto";
}
