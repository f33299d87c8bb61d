"use strict";
// Every change of the form asks the server; one question at a time, and the last one counts.
const form = document.getElementById("question"), answer = document.getElementById("answer");
const question = () => new URLSearchParams(new FormData(form)).toString();
const showFaults = faults => {
  for (const at of document.querySelectorAll(".why")) at.textContent = faults[at.id.replace("why-", "")] || "";
  for (const input of form.elements) input.setAttribute("aria-invalid", input.name in faults);
};
const speed = () => Number(document.getElementById("change")?.dataset.speed);
let asked = question(), busy = false, timer;
const ask = async () => {
  const query = question();
  if (busy || query === asked) return;
  busy = true;
  asked = query;
  answer.ariaBusy = "true";
  try {
    const reply = await (await fetch("answer?" + query)).json();
    showFaults(reply.faults);
    answer.classList.toggle("old", !reply.html);
    if (reply.html) {
      const open = document.getElementById("command")?.open, before = speed();
      answer.innerHTML = reply.html;
      document.getElementById("command").open = open;
      if (before) document.getElementById("change").textContent = `${((speed() / before - 1) * 100).toFixed(1)} % tokens/s against the previous answer`.replace(/^(?!-)/, "+");
      timelines();
      history.replaceState(null, "", "?" + query);
    }
  } catch {
    showFaults({ "": "no answer: galvatron what-if has ended; start it again" });
    answer.classList.add("old");
  }
  busy = false;
  answer.ariaBusy = "false";
  ask();
};
form.addEventListener("input", () => { clearTimeout(timer); timer = setTimeout(ask, 150); });
form.addEventListener("submit", event => { event.preventDefault(); ask(); });
