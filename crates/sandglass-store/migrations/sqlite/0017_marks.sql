-- What programs in an image have of volumes, as the server writes it, by the image's name.
CREATE TABLE volume_marks (
    image TEXT NOT NULL PRIMARY KEY CHECK (length(image) = 20),
    marks TEXT NOT NULL
) STRICT;
