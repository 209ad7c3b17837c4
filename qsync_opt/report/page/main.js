// The theme follows the system until the reader chooses one.
function drawTheme() {
  const button = document.getElementById("theme");
  const names = ["system", "light", "dark"];
  let current = 0;
  button.hidden = false;
  button.addEventListener("click", () => {
    current = (current + 1) % names.length;
    if (current) document.documentElement.dataset.theme = names[current];
    else delete document.documentElement.dataset.theme;
    button.textContent = "Theme: " + names[current];
  });
}
drawTheme();
drawModel();
drawTable();
drawFronts();
drawTimeline();
data.devices.forEach(drawMemory);
followHash();
addEventListener("hashchange", followHash);
// On paper there is no next page of the table.
addEventListener("beforeprint", () => { view.all = true; drawRows(); });
addEventListener("afterprint", () => { view.all = false; drawRows(); });
