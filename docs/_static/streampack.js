// What the theme leaves out for readers with a keyboard or a screen reader.
document.addEventListener("DOMContentLoaded", () => {
  for (const box of document.querySelectorAll(".table-wrapper, div.highlight pre, .sidebar-scroll")) box.tabIndex = 0;
  for (const caption of document.querySelectorAll(".caption[role=heading]")) caption.ariaLevel = "2";
  // Sphinx lays the arguments of a signature out as a list without terms.
  for (const part of document.querySelectorAll(".sig dl, .sig dd")) part.role = "presentation";
});
