// Typesets the formulas that pymdownx.arithmatex has marked on this page.
const delimiters = [
  { left: "\\(", right: "\\)", display: false },
  { left: "\\[", right: "\\]", display: true },
];
for (const element of document.querySelectorAll(".arithmatex")) {
  renderMathInElement(element, { delimiters });
}
