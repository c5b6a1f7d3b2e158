// The resolved profile: every setting, its value, where that came from, and what it means.

import { count, element, setText } from "./format.js";

export class ProfileView {
  constructor() {
    this.settings = [];
    this.box = document.getElementById("profile-table");
    this.name = document.getElementById("profile-name");
    this.filter = document.getElementById("profile-filter");
    this.changed = document.getElementById("profile-changed");
    this.filter.addEventListener("input", () => this.draw());
    this.changed.addEventListener("change", () => this.draw());
  }

  show(profile) {
    this.settings = profile.settings;
    const changed = this.settings.filter((setting) => setting.origin !== "default").length;
    setText(this.name, `${profile.name}: ${count(changed)} of ${count(this.settings.length)} settings are not the default`);
    this.draw();
  }

  draw() {
    const words = this.filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    const shown = this.settings.filter((setting) => {
      const text = `${setting.path} ${setting.value} ${setting.origin} ${setting.meaning}`.toLowerCase();
      return words.every((word) => text.includes(word)) && !(this.changed.checked && setting.origin === "default");
    });
    if (!shown.length) {
      this.box.replaceChildren(element("p", { className: "empty" }, "No setting is like that."));
      return;
    }
    const rows = [];
    let section = "";
    for (const setting of shown) {
      const cut = setting.path.lastIndexOf(".");
      if (setting.path.slice(0, cut) !== section) {
        section = setting.path.slice(0, cut);
        rows.push(element("tr", { className: "section" }, element("th", { colSpan: 4, scope: "rowgroup" }, section)));
      }
      const isChanged = setting.origin !== "default";
      rows.push(element("tr", { className: isChanged ? "changed" : "" },
        element("td", {}, element("code", {}, setting.path.slice(cut + 1))),
        element("td", {}, element("code", {}, setting.value)),
        element("td", {}, setting.origin),
        element("td", {}, setting.meaning)));
    }
    const heads = ["Setting", "Value", "From", "Meaning"].map((name) => element("th", { scope: "col" }, name));
    this.box.replaceChildren(element("table", {}, element("thead", {}, element("tr", {}, ...heads)), element("tbody", {}, ...rows)));
  }
}
