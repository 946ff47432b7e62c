// Hover or focus a sequence: its row, text and place appear below. Arrow keys move within a pack.
for (const figure of document.querySelectorAll("[data-packs]")) {
  const panel = figure.querySelector(".detail");
  let shown = null;
  const show = (button) => {
    if (!button || button === shown) return;
    if (shown) shown.setAttribute("aria-pressed", "false");
    shown = button;
    button.setAttribute("aria-pressed", "true");
    panel.replaceChildren(document.getElementById(button.dataset.detail).content.cloneNode(true));
  };
  for (const pack of figure.querySelectorAll(".pack")) {
    const buttons = [...pack.querySelectorAll("button")];
    const focus = (index) => {
      const next = buttons[Math.max(0, Math.min(buttons.length - 1, index))];
      for (const button of buttons) button.tabIndex = button === next ? 0 : -1;
      next.focus();
    };
    pack.addEventListener("mouseover", (event) => show(event.target.closest("button")));
    pack.addEventListener("focusin", (event) => show(event.target.closest("button")));
    pack.addEventListener("click", (event) => {
      const at = buttons.indexOf(event.target.closest("button"));
      if (at >= 0) focus(at);
    });
    pack.addEventListener("keydown", (event) => {
      const at = buttons.indexOf(event.target);
      const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: buttons.length - 1 }[event.key];
      if (at < 0 || to === undefined) return;
      event.preventDefault();
      focus(to);
    });
  }
}
