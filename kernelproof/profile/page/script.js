"use strict";
// Names the instruction under the pointer, and leads from the picture to its row. The picture is drawn without it.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const svg = document.querySelector(".timeline svg"), tip = document.getElementById("tip");
  if (!svg) return;  // a profile without issues has no picture
  const lanes = new Map();
  for (const [warp, line, cycle] of data.issues) {
    if (!lanes.has(`warp ${warp}`)) lanes.set(`warp ${warp}`, []);
    lanes.get(`warp ${warp}`).push([cycle, line]);
  }
  for (const issues of lanes.values()) issues.sort((a, b) => a[0] - b[0]);
  function under(event) {  // the instruction that issues next in the lane of the pointer
    const box = svg.getBoundingClientRect(), lane = event.target.closest("[data-lane]");
    const cycle = (event.clientX - box.left - data.left) / data.scale;
    return lane && (lanes.get(lane.dataset.lane) ?? []).find((issue) => issue[0] + 1 > cycle);
  }
  function element(parent, name, text) {
    const node = document.createElement(name);
    node.textContent = text;
    parent.append(node);
  }
  svg.addEventListener("pointermove", (event) => {
    const issue = under(event);
    tip.hidden = !issue;
    if (!issue) return;
    const cells = document.getElementById(`line-${issue[1]}`).cells;
    tip.replaceChildren();
    element(tip, "b", cells[0].textContent);
    element(tip, "div", `cycle ${issue[0].toFixed(0)}; on average ${cells[2].textContent} cycles: ${cells[3].dataset.words}`);
    element(tip, "div", cells[4].textContent.trim());
    const size = tip.getBoundingClientRect();
    tip.style.left = `${Math.max(4, Math.min(event.clientX + 16, innerWidth - size.width - 4))}px`;
    tip.style.top = `${Math.max(4, Math.min(event.clientY + 12, innerHeight - size.height - 8))}px`;
  });
  svg.addEventListener("pointerleave", () => { tip.hidden = true; });
  svg.addEventListener("click", (event) => {
    const issue = under(event);
    if (issue) location.hash = `line-${issue[1]}`;
  });
})();
