// The search of a site that is opened as files: browsers start no worker there, so a frame of this
// page does its work.  The theme would load the like of it from another server.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      this.inner = new Promise((done) => {
        frame.onload = () => {
          const inner = frame.contentWindow
          inner.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }))
          const script = inner.document.createElement("script")
          script.src = new URL(url, location.href).href
          script.onload = () => done(inner)
          frame.onload = null
          inner.document.body.append(script)
        }
      })
      document.body.append(frame)
    }
    postMessage(data) {
      this.inner.then((inner) => inner.dispatchEvent(new MessageEvent("message", { data })))
    }
    terminate() {}
  }
}
