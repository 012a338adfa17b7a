// Gradio's own scrolling stops once more than 100 pixels are added in one step, as by a long prompt.
const sent = () => element.querySelectorAll(".osd-you").length;
let box = element, before = sent(), follows = true;
while (box.parentElement && !/auto|scroll/.test(getComputedStyle(box).overflowY)) box = box.parentElement;
box.addEventListener("scroll", () => { follows = box.scrollTop + box.clientHeight > box.scrollHeight - 40; });
new MutationObserver(() => {
    if (sent() > before) follows = true;
    before = sent();
    if (follows) box.scrollTop = box.scrollHeight;
}).observe(box, {childList: true, subtree: true, characterData: true});
