"use strict";

// Chromium without a locale names a language that no part of the browser takes ("en-US@posix"), and the chart's library
// ends at it. So this comes before the library.
try {
  new Intl.NumberFormat(navigator.language);
} catch {
  Object.defineProperty(navigator, "language", { value: "en-US" });
}
